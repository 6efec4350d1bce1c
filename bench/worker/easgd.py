"""Elastic Averaging SGD, asynchronous (Zhang, Choromanska, LeCun 2015).

Every rank trains weights x of its own. After `period` steps an elastic force of `moving_rate` draws them and the
centre c, which the servers hold, towards each other: x loses moving_rate (x - c), and c gains the same.
"""

import torch

from bench.worker.placement import Block
from bench.worker.served import Served, ServedEngine


class ElasticEngine(ServedEngine):
    def adopt(self, weights: dict[str, torch.Tensor], period: int, moving_rate: float, scale: float) -> None:
        self.centre = {name: weight.clone() for name, weight in weights.items()}
        super().adopt(weights, period, moving_rate, scale)

    def change(self, served: Served, message: torch.Tensor) -> torch.Tensor:
        """The answer is the centre before the change, so that both sides move by the same difference."""
        before = served.content.clone()
        served.content.add_(message - before, alpha=self.moving_rate)
        return before

    def use(self, block: Block, answer: torch.Tensor) -> None:
        parts = answer.split([self.weights[name].numel() for name in block.names])
        for name, part in zip(block.names, parts, strict=True):
            weight = self.weights[name]
            before = part.view_as(weight)
            weight.sub_(weight - before, alpha=self.moving_rate)
            self.centre[name].copy_(before)

    def average(self) -> dict[str, torch.Tensor]:
        """The centre, as this rank last saw it."""
        return self.centre
