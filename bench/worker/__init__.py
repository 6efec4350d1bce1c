"""What runs on the nodes: the standard library and the packages of requirements/nodes.in only."""
