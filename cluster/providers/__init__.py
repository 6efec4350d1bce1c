"""What differs between kinds of nodes: one folder per provider."""
