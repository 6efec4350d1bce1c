"""Measure, explain and predict how data-parallel training scales over a network."""
