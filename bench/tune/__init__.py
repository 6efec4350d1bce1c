"""Search for the fastest settings of a fabric."""
