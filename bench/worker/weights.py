"""The base of engines that hold the weights: a device submits updates, and goes on with what the engine gives back.

An engine that sums gradients keeps all ranks at the same weights. These do not: a rank may compute on weights to which
others have added updates meanwhile. How many those were is the staleness of its update.
"""

from collections import Counter

import torch

from bench.worker.engines import TorchEngine


class WeightEngine(TorchEngine):
    holds_weights = True
    overlaps = False  # updates leave during backward

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, torch.Tensor] = {}
        self.staleness: Counter[int] = Counter()
        self.period, self.steps = 1, 0

    def adopt(self, weights: dict[str, torch.Tensor], period: int, moving_rate: float, scale: float) -> None:
        """Train these weights from now on; on every rank the same, in backward order. The engine changes them."""
        self.weights, self.period, self.steps = weights, period, 0
        self.staleness.clear()

    def begin(self, scale: float) -> None: ...

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        """Add an update to this rank's weights."""
        self.weights[name].add_(tensor)

    def wait(self) -> None:
        """End a step: exchange weights if it is time."""
        self.steps += 1
        if self.steps % self.period == 0:
            self.exchange()

    @property
    def exchanges_next(self) -> bool:
        return (self.steps + 1) % self.period == 0

    def exchange(self) -> None:
        raise NotImplementedError

    def average(self) -> dict[str, torch.Tensor]:
        """The weights by which the training is judged; at other steps than those of an exchange, a rank's own."""
        return self.weights

    def check(self) -> None:
        """Fail if an exchange got lost. All ranks call it after the same number of steps."""
        raise NotImplementedError

    def expect_equal_weights(self) -> None:
        total = float(sum(weight.double().sum() for weight in self.weights.values()))
        sums = self.gather(total)
        if max(sums) - min(sums) > 1e-6 * max(1.0, abs(sums[0])):
            raise RuntimeError(f"the weights differ between ranks: their sums are {sums}")
