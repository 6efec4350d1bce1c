"""One bit per gradient element with error feedback: the rounding error is added to the next step's gradient.

A tensor is sent as its signs, the mean of its positive and the mean of its negative elements (Seide et al. 2014).
Signs cannot be summed on the way, so each rank receives the payloads of all ranks and sums the decoded values.
"""

from typing import Any, cast

import numpy as np
import torch

from bench.worker.engines import Engine
from bench.worker.protocol import ONE_BIT_HEADER


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes to send, and the values that a receiver decodes from them."""
    flat = values.flatten()
    positive = flat >= 0
    means = [float(part.mean()) if part.numel() else 0.0 for part in (flat[positive], flat[~positive])]
    header = np.array(means, dtype=np.float32)
    payload = np.concatenate([header.view(np.uint8), np.packbits(positive.numpy())])
    return torch.from_numpy(payload), torch.where(positive, *map(float, header)).view_as(values)


def decode(payload: torch.Tensor, count: int) -> torch.Tensor:
    raw = payload.numpy()
    high, low = raw[:ONE_BIT_HEADER].view(np.float32)
    signs = torch.from_numpy(np.unpackbits(raw[ONE_BIT_HEADER:], count=count)).bool()
    return torch.where(signs, float(high), float(low))


class OneBit:
    """Wraps an engine and sends gradients as single bits. All other calls go to the engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.residuals: dict[str, torch.Tensor] = {}
        self.sent: list[tuple[torch.Tensor, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def begin(self, scale: float) -> None:
        self.engine.begin(scale)
        self.sent = []

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        corrected = tensor.detach() + self.residuals.get(name, 0.0)
        payload, decoded = encode(corrected)
        self.residuals[name] = corrected - decoded
        self.sent.append((tensor, payload.numel()))
        self.engine.submit_bytes(name, payload)

    def wait(self) -> None:
        for (tensor, size), gathered in zip(self.sent, self.engine.wait_bytes(), strict=True):
            parts = (decode(payload, tensor.numel()) for payload in gathered.split(size))
            tensor.copy_(torch.stack(tuple(parts)).sum(0).view_as(tensor))


def wrap(engine: Engine, compression: str) -> Engine:
    return cast(Engine, OneBit(engine)) if compression == "1bit" else engine
