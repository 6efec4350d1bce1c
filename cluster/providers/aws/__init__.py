"""Instances on EC2."""
