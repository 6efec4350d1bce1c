"""Make, verify, copy and time data sets of tar shards."""
