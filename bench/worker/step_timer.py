"""Time the parts of a training step by marks on the compute stream. Needs no torch: a fake device tests it.

    start        first gradient   last gradient      summed       end
      | forward, backward ...          |                | optimiser |
                      | communication                   |

Compute is start to last gradient, and summed to end. What remains of the step is exposed communication.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from bench.worker.accelerator import Accelerator
from bench.worker.protocol import Step


class Work(Protocol):
    """The parts of a step, in this order. On a GPU each returns when its work is started, not when it is done."""

    def fetch(self) -> bool:
        """Get the images of the step; whether any had to be copied to the device."""

    def backward(self) -> None:
        """Forward and backward. Calls StepTimer.gradient for each gradient, after it was given to the engine."""

    def sum(self) -> None:
        """Wait until the compute stream can use the sums of all gradients."""

    def update(self) -> None:
        """Change the weights."""


class StepTimer:
    def __init__(self, accelerator: Accelerator, clock: Callable[[], float] = time.perf_counter) -> None:
        self.accelerator, self.clock = accelerator, clock
        self.first: Any = None
        self.last: Any = None

    def gradient(self) -> None:
        """A gradient is ready. Only the first and the last one count."""
        if self.first is None:
            self.first = self.accelerator.mark()
        self.last = self.accelerator.mark(self.last)

    def step(self, work: Work) -> Step:
        device = self.accelerator
        self.first = self.last = None
        begin = self.clock()
        fetched = work.fetch()
        start = device.mark()
        if fetched:
            # The copy to the device is part of the wait for images.
            device.wait(start)
        data_wait = self.clock() - begin
        work.backward()
        work.sum()
        summed = device.mark()
        work.update()
        end = device.mark()
        device.wait(end)
        total = self.clock() - begin
        compute = device.seconds(start, self.last) + device.seconds(summed, end)
        return Step(total, compute, device.seconds(self.first, summed), data_wait)
