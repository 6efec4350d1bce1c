"""Progress of a sweep: a line per finished point, and in a terminal a live view of the current point."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Mapping
from types import TracebackType

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from bench.results.trial import Point
from cluster.core.terminal import Console

console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 150)


class Progress:
    """work: trial id -> expected seconds; done: ids of the trials that are already measured."""

    def __init__(self, work: Mapping[str, float], done: Collection[str], screen: Console = console) -> None:
        self.work, self.total, self.count, self.screen = work, len(work), len(done), screen
        self.pending = sum(work.values()) - sum(work[identifier] for identifier in done)
        self.spent = 0.0
        self.begin = time.monotonic()
        self.current, self.state = "", ""
        self.live: Live | None = None

    def __enter__(self) -> Progress:
        if self.screen.is_terminal:
            self.live = Live(self, console=self.screen, refresh_per_second=2, transient=True)
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self.live:
            self.live.stop()

    def minutes_left(self) -> float | None:
        return max(0.0, (time.monotonic() - self.begin) / self.spent * self.pending / 60) if self.spent else None

    def __rich__(self) -> Table:
        view = Table.grid(padding=(0, 2))
        left = self.minutes_left()
        bar = ProgressBar(total=self.total, completed=self.count, width=30)
        view.add_row(f"{self.count}/{self.total}", bar, "estimating" if left is None else f"{left:.1f} min left")
        view.add_row("", self.current, self.state)
        return view

    def doing(self, current: str, state: str) -> None:
        """Set the current point and its state for the live view."""
        self.current, self.state = current, state

    def finished(self, identifier: str, label: str, text: str) -> None:
        self.count += 1
        self.pending -= self.work[identifier]
        self.spent += self.work[identifier]
        left = self.minutes_left() or 0.0
        self.screen.print(f"[{self.count:3}/{self.total}] {label}: {text}; {left:.1f} min left", markup=False)


def label(point: Point) -> str:
    more = "" if point.data == "synthetic" else ", real data"
    more += "" if point.compression == "none" else f", {point.compression}"
    return f"{point.engine} {point.fabric} {point.nodes} nodes, batch {point.batch}, {point.model}{more}"
