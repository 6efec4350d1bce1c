"""A user's own program on all nodes: copy it, start it, follow it, fetch what it wrote."""
