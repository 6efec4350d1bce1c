"""Train a small network to a target accuracy with every engine, in the time of a larger one."""
