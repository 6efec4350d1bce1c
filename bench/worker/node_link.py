"""The link between the emulated GPUs of a node: no sum is there before such a link could have carried it.

The engine sums over this machine's memory, which has another speed. So the time on the link is computed: it carries one
tensor after the other, from the moment each is ready. Between nodes the slower of this link and the network decides.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

    from bench.worker.engines import Engine


def sleep_until(moment: float) -> None:
    remaining = moment - time.perf_counter()
    if remaining > 0:
        time.sleep(remaining)


class NodeLink:
    """Wraps an engine. Calls that send no gradients go to the engine unchanged."""

    def __init__(self, engine: Any, seconds_per_byte: float) -> None:
        self.engine, self.seconds_per_byte = engine, seconds_per_byte
        self.idle_from, self.at_end = 0.0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def begin(self, scale: float) -> None:
        self.idle_from, self.at_end = 0.0, 0.0
        self.engine.begin(scale)

    def carry(self, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self.idle_from = max(self.idle_from, time.perf_counter()) + size * self.seconds_per_byte

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        if self.engine.holds_weights and not self.engine.overlaps:
            # Weights cross the link after the step, when the engine exchanges them.
            self.at_end += tensor.numel() * tensor.element_size() * self.seconds_per_byte
        else:
            self.carry(tensor)
        self.engine.submit(name, tensor)

    def submit_bytes(self, name: str, payload: torch.Tensor) -> None:
        self.carry(payload)
        self.engine.submit_bytes(name, payload)

    def wait(self) -> None:
        if self.at_end and self.engine.exchanges_next:
            self.idle_from = time.perf_counter() + self.at_end
        self.engine.wait()
        sleep_until(self.idle_from)

    def wait_bytes(self) -> list[torch.Tensor]:
        received: list[torch.Tensor] = self.engine.wait_bytes()
        sleep_until(self.idle_from)
        return received


def wrap(engine: Engine, seconds_per_byte: float) -> Engine:
    return cast("Engine", NodeLink(engine, seconds_per_byte)) if seconds_per_byte else engine
