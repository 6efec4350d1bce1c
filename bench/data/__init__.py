"""Images as tar shards: made, checked, copied and timed."""
