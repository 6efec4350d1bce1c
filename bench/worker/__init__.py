"""What runs on the nodes: standard library, torch and Horovod only."""
