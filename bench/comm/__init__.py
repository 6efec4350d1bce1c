"""Time collectives on a cluster."""
