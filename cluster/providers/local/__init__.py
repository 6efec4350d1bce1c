"""Containers on this machine."""
