"""Numbers as users write them in options: finite, and within limits that make sense."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cluster.core.errors import bounded

# No quantity of a cluster is larger or, above zero, smaller.
SMALLEST, LARGEST = 1e-9, 1e15
# No cluster has more GPUs or cores, no batch more images.
MOST = 10**6


@dataclass(frozen=True)
class Number:
    """For type= of an option: a number from low to high."""

    low: float = SMALLEST
    high: float = LARGEST

    def __call__(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{bounded(text, 60)!r} is not a number") from None
        # Not a number compares as neither below nor above.
        if not self.low <= value <= self.high:
            raise argparse.ArgumentTypeError(f"{bounded(text, 60)} is not possible; give a number {self.limits()}")
        return value

    def limits(self) -> str:
        low = "above 0" if self.low == SMALLEST else f"from {self.low:g}"
        return low if self.high == LARGEST else f"{low} to {self.high:g}"


@dataclass(frozen=True)
class Whole:
    """For type= of an option: a whole number from low to high."""

    low: int = 1
    high: int = MOST

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{bounded(text, 60)!r} is not a whole number") from None
        if not self.low <= value <= self.high:
            limits = f"from {self.low} to {self.high}"
            raise argparse.ArgumentTypeError(f"{bounded(text, 60)} is not possible; give a whole number {limits}")
        return value


COUNT = Whole()
POSITIVE = Number()
# A day: whoever wants more repeats the command.
SECONDS = Number(high=86_400)
MINUTES = Number(high=1440)
SEED = Whole(0, 2**32 - 1)
PORT = Whole(1, 65535)
