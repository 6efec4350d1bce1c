"""The network that `bench converge` trains: small enough that its time can be hidden in that of the emulated one."""

import torch
from torch import nn


def make(pixels: int, classes: int, seed: int) -> nn.Sequential:
    """Without batch normalisation, whose statistics depend on how a batch is split."""
    torch.manual_seed(seed)
    side = pixels // 4
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * side * side, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )
