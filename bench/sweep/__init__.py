"""Measure the points of a plan on a cluster."""
