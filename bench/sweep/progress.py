"""Progress of a sweep: a line per finished point, and the current point with its state."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from bench.results import dimensions
from bench.results.trial import Point
from cluster.core import progress
from cluster.core.terminal import Console

console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 150)


@contextmanager
def lines_on_stderr() -> Iterator[None]:
    """For --json: standard output has the JSON and nothing else."""
    console.stderr = True
    try:
        yield
    finally:
        console.stderr = False


class Progress:
    """work: trial id -> expected seconds; done: ids of the trials that are already measured."""

    def __init__(self, work: Mapping[str, float], done: Collection[str], shown: progress.Progress) -> None:
        self.work, self.total, self.count, self.shown = work, len(work), len(done), shown
        self.pending = sum(work.values()) - sum(work[identifier] for identifier in done)
        self.spent = 0.0
        self.begin = time.monotonic()

    def minutes_left(self) -> float | None:
        return max(0.0, (time.monotonic() - self.begin) / self.spent * self.pending / 60) if self.spent else None

    def doing(self, current: str, state: str) -> None:
        """Set the current point and its state."""
        left = self.minutes_left()
        estimate = "" if left is None else f"; {left:.1f} min left"
        self.shown.now("sweep", f"[{self.count}/{self.total}] {current}: {state}{estimate}")

    def finished(self, identifier: str, label: str, text: str) -> None:
        self.count += 1
        self.pending -= self.work[identifier]
        self.spent += self.work[identifier]
        left = self.minutes_left() or 0.0
        self.shown.line(f"[{self.count:3}/{self.total}] {label}: {text}; {left:.1f} min left")


def label(point: Point) -> str:
    more = "" if point.data == "synthetic" else f", {dimensions.data_name(point.data)}"
    more += "" if point.compression == "none" else f", {point.compression}"
    more += f", repeat {point.repeat + 1}" if point.repeat else ""
    nodes = f"{point.nodes} nodes" + (f" x {point.gpus_per_node} GPUs" if point.gpus_per_node > 1 else "")
    return f"{point.engine} {point.fabric} {nodes}, batch {point.batch}, {point.model}{more}"
