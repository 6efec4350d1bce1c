"""Bring a Horovod cluster up, look after it, take it down."""
