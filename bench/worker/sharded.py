"""Sharded weights (FSDP): torch's fully_shard, unit by unit."""

import torch
from torch import nn


def shard(model: nn.Module) -> nn.Module:
    """Each element of the network's sequence is gathered and freed on its own, then what remains."""
    from torch.distributed.fsdp import fully_shard

    # A sequence inside a unit belongs to the unit.
    sequences = [model] if isinstance(model, nn.Sequential) else model.children()
    for sequence in [part for part in sequences if isinstance(part, nn.Sequential)]:
        for part in sequence:
            if any(True for _ in part.parameters()):
                fully_shard(part)
    fully_shard(model)
    return model


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """All of a parameter or gradient, of which a rank holds a share."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
