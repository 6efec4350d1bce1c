"""Local SGD: every rank trains alone, and all average their weights after every `period` steps.

With period 1 this is synchronous training: averaging weights after a step averages the gradients of that step.
"""

from typing import Any

import torch

from bench.worker.engines import DDP_BUCKET
from bench.worker.placement import Block, blocks
from bench.worker.weights import WeightEngine


class LocalSgdEngine(WeightEngine):
    def adopt(self, weights: dict[str, torch.Tensor], period: int, moving_rate: float, scale: float) -> None:
        super().adopt(weights, period, moving_rate, scale)
        sizes = {name: weight.numel() for name, weight in weights.items()}
        self.blocks = blocks(sizes, 1, DDP_BUCKET / scale)

    def exchange(self) -> None:
        pending: list[tuple[Any, torch.Tensor, Block]] = []
        for block in self.blocks:
            flat = torch.cat([self.weights[name].flatten() for name in block.names])
            pending.append((self.dist.all_reduce(flat, async_op=True), flat, block))
        for work, flat, block in pending:
            work.wait()
            flat.div_(self.size)
            parts = flat.split([self.weights[name].numel() for name in block.names])
            for name, part in zip(block.names, parts, strict=True):
                self.weights[name].copy_(part.view_as(self.weights[name]))

    def check(self) -> None:
        if self.steps % self.period == 0:
            self.expect_equal_weights()
