"""Machines that exist already."""
