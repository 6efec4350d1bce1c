"""The imec Virtual Wall: bare-metal nodes and LANs of a chosen rate, requested as a GENI v3 RSpec."""
