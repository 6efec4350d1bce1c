"""Linear layers split over all ranks by torch's DTensor: columns of the first, rows of the second.

Transformers: every rank processes all samples, with its share of the attention heads and of the hidden units. VGG and
AlexNet: convolutions stay data-parallel; the samples of all ranks pass through each rank's share of the large layers.
"""

from typing import Any

import torch
from torch import nn

from bench.worker.torch_transformers import Attention, PostNormBlock, PreNormBlock

# As bench/plan/programs.py: a smaller layer is not worth splitting.
LARGE_LINEAR = 1 << 22


class SplitAttention(nn.Module):
    """The joint query, key and value layer: each rank has the rows of its heads in all three."""

    def __init__(self, linear: nn.Linear, mesh: Any) -> None:
        super().__init__()
        from torch.distributed.tensor import Shard, distribute_tensor

        inputs = linear.in_features
        self.mesh = mesh
        weight, bias = linear.weight.detach().view(3, -1, inputs), linear.bias.detach().view(3, -1)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(1)]))
        self.bias = nn.Parameter(distribute_tensor(bias, mesh, [Shard(1)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        # Backward adds up what each rank's heads say about x.
        shared: torch.Tensor = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        weight, bias = self.weight.to_local().flatten(0, 1), self.bias.to_local().flatten(0, 1)
        return nn.functional.linear(shared, weight, bias)


def is_transformer(model: nn.Module) -> bool:
    return any(isinstance(part, PreNormBlock | PostNormBlock) for part in model.modules())


def split(model: nn.Module, mesh: Any, large: int = LARGE_LINEAR) -> nn.Module:
    """Splits in place. Parameters that are split are DTensors afterwards."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in [part for part in model.modules() if isinstance(part, PreNormBlock | PostNormBlock)]:
        plan: dict[str, Any] = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
        if isinstance(block, PostNormBlock):
            plan |= {name: ColwiseParallel() for name in ("query", "key", "value")} | {"output": RowwiseParallel()}
            block.heads //= mesh.size()
        else:
            attention: Attention = block.attention
            attention.qkv = SplitAttention(attention.qkv, mesh)
            attention.heads //= mesh.size()
            plan["attention.output"] = RowwiseParallel()
        parallelize_module(block, mesh, plan)
    if not is_transformer(model):
        _split_pair(model, mesh, large)
    return model


def _split_pair(model: nn.Module, mesh: Any, large: int) -> None:
    """Samples are gathered before the first large layer; the sums of the second one are scattered by sample again."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for part in model.modules():
        if isinstance(part, nn.ReLU):
            # What comes out of a split layer is a view, which must not be changed in place.
            part.inplace = False
    linear = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)][:-1]
    (first, _), (second, _) = [(name, part) for name, part in linear if part.weight.numel() >= large]
    plan = {
        # As a DTensor, which knows its whole size: shares need not be equal.
        first: ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        second: RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, mesh, plan)


def own(parameter: torch.Tensor) -> bool:
    """Whether a rank holds a share of the parameter: its gradient needs no sum over ranks."""
    return hasattr(parameter, "full_tensor")
