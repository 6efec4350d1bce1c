"""The devices of bench/worker/devices.py for engines that hold the weights: they submit updates instead of gradients.

An update is the step of SGD with momentum on this rank's own gradient; the momentum stays on the rank.
"""

from typing import Any

import torch
from torch import nn

from bench.worker.accelerator import Accelerator, Arithmetic
from bench.worker.devices import LEARNING_RATE, EmulatedDevice, TrainingDevice
from bench.worker.engines import Engine
from bench.worker.feed import Feed
from bench.worker.protocol import Gradient, TrialSpec

MOMENTUM = 0.9


class EmulatedWeights(EmulatedDevice):
    def __init__(self, trial: TrialSpec, gradients: list[Gradient], source: Feed, engine: Any) -> None:
        super().__init__(trial, gradients, source)
        self.sends_at_end = not engine.overlaps
        weights = {name: torch.zeros_like(tensor) for name, tensor, _ in self.gradients}
        engine.adopt(weights, trial.period, trial.moving_rate, trial.scale)

    def check(self, engine: Any) -> None:
        engine.check()


class TrainedWeights(TrainingDevice):
    def __init__(
        self,
        model: nn.Module,
        images: torch.Tensor,
        labels: torch.Tensor,
        trial: TrialSpec,
        source: Feed,
        accelerator: Accelerator,
        arithmetic: Arithmetic,
        engine: Any,
    ) -> None:
        super().__init__(model, images, labels, trial.model, False, source, accelerator, arithmetic)
        self.rate = LEARNING_RATE
        parameters = list(model.parameters())
        self.momentum = [torch.zeros_like(parameter) for parameter in parameters]
        backward = reversed(list(enumerate(parameters)))
        weights = {f"{self.name}.{number}": parameter.data for number, parameter in backward}
        engine.adopt(weights, trial.period, trial.moving_rate, 1.0)
        for number, parameter in enumerate(parameters):
            # Hogwild has moved them to shared memory.
            parameter.data = weights[f"{self.name}.{number}"]

    def submit(self, number: int, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None and self.engine is not None  # noqa: S101
        momentum = self.momentum[number].mul_(MOMENTUM).add_(parameter.grad)
        self.engine.submit(f"{self.name}.{number}", momentum * -self.rate)
        self.timer.gradient()

    def update(self) -> None:
        """The engine has changed the weights."""

    def check(self, engine: Any) -> None:
        engine.check()


def staleness(engine: Engine) -> dict[str, int]:
    found = getattr(engine, "staleness", {})
    return {str(updates): count for updates, count in sorted(found.items())}
