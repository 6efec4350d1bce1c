"""The parameter server without a barrier: an update changes the weights when it arrives, and its worker goes on with
the weights of that moment (Dean et al. 2012). Updates leave during backward, block by block."""

import torch

from bench.worker.placement import Block
from bench.worker.served import Served, ServedEngine


class AsynchronousServerEngine(ServedEngine):
    overlaps = True

    def begin(self, scale: float) -> None:
        self.ready: dict[int, dict[str, torch.Tensor]] = {}
        self.announce()

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        block = self.block_of[name]
        parts = self.ready.setdefault(block.number, {})
        parts[name] = tensor.flatten()
        if len(parts) == len(block.names):
            self.send(block, torch.cat([parts[one] for one in block.names]))

    def wait(self) -> None:
        self.steps += 1
        self.finish()

    def change(self, served: Served, message: torch.Tensor) -> torch.Tensor:
        return served.content.add_(message).clone()

    def use(self, block: Block, answer: torch.Tensor) -> None:
        parts = answer.split([self.weights[name].numel() for name in block.names])
        for name, part in zip(block.names, parts, strict=True):
            self.weights[name].copy_(part.view_as(self.weights[name]))
