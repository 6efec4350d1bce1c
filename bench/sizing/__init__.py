"""bench plan: the network, storage and time a training run needs."""
