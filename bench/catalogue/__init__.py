"""What is known beforehand: the networks' layers and gradients, published rates of GPUs, published scaling tables."""
