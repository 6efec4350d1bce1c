"""The imec Virtual Wall: bare-metal nodes and LANs of a chosen rate, asked for as a GENI v3 request RSpec."""
