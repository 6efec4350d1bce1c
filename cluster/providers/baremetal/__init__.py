"""Hosts that already exist."""
