"""Collectives, timed."""
