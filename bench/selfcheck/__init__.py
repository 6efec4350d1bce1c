"""Check a cluster against what we expect of it."""
