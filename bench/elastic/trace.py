"""The trace of an elastic run: each step of each process, and what a fault cost.

examples/imagenet_elastic.py --trace writes it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Seconds over which images/s are counted before and after a fault.
WINDOW = 6.0


@dataclass(frozen=True)
class Row:
    """generation counts how often processes started from a common state: a step may be done again in a later one.

    start and weights are checksums of the weights: at the start of the generation, and after the step.
    """

    place: str
    time: float
    step: int
    generation: int
    rank: int
    size: int
    images: tuple[int, ...]
    start: int
    weights: int

    @property
    def group(self) -> tuple[int, int]:
        """Changes when processes come or go."""
        return self.generation, self.size


@dataclass(frozen=True)
class Recovery:
    """seconds: from the fault to the first step of the new group; stood: from the last step before that one."""

    seconds: float
    stood: float
    steps_lost: int
    before: float
    after: float
    nodes_before: int
    nodes_after: int


def parse(text: str) -> list[Row]:
    """Lines `trace-PLACE.jsonl:JSON`, as grep prints them."""
    rows = []
    for line in text.splitlines():
        name, _, content = line.partition(".jsonl:")
        try:
            value = json.loads(content)
            rows.append(Row(name.removeprefix("trace-"), **{**value, "images": tuple(value["images"])}))
        except (ValueError, TypeError, KeyError):
            # A node stopped while it wrote. Without this line its step counts as incomplete.
            continue
    return sorted(rows, key=lambda row: row.time)


def kept(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """Of each step the last time that it was done; what was done before was lost."""
    steps: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        steps[row.step].append(row)
    return {
        step: [row for row in found if row.generation == max(row.generation for row in found)]
        for step, found in sorted(steps.items())
    }


def problems(rows: Iterable[Row], images: Iterable[int], steps_per_epoch: int) -> list[str]:
    """Steps whose processes do not agree, starts from other weights than the last commit's, and epochs, complete ones,
    that do not use every image once."""
    rows = list(rows)
    found, epochs = wrong_starts(rows), defaultdict(list)
    expected = Counter(images)
    for step, done in kept(rows).items():
        if sorted(row.rank for row in done) != list(range(done[0].size)):
            found.append(f"step {step}: ranks {sorted(row.rank for row in done)} of {done[0].size}")
        if len({row.weights for row in done}) > 1:
            found.append(f"step {step}: the weights differ between ranks")
        epochs[step // steps_per_epoch].append(done)
    for epoch, steps in epochs.items():
        used = Counter(image for done in steps for row in done for image in row.images)
        if len(steps) == steps_per_epoch and used != expected:
            wrong = sum((used - expected).values()), sum((expected - used).values())
            found.append(f"epoch {epoch}: {wrong[0]} images too many, {wrong[1]} missing")
        if len(steps) != steps_per_epoch and epoch != max(epochs):
            found.append(f"epoch {epoch}: {len(steps)} of {steps_per_epoch} steps")
    return found


def until_cancelled(rows: Sequence[Row]) -> list[Row]:
    """Without the last step, which only some processes may have ended when the run was cancelled."""
    last = max((row.step for row in rows), default=0)
    return [row for row in rows if row.step < last]


def wrong_starts(rows: Sequence[Row]) -> list[str]:
    """Generations that did not start, on all processes, from the weights after the step before their first."""
    found = []
    for generation in sorted({row.generation for row in rows}):
        own = [row for row in rows if row.generation == generation]
        first = min(row.step for row in own)
        earlier = [row for row in rows if row.generation < generation and row.step == first - 1]
        last = max((row.generation for row in earlier), default=0)
        committed = {row.weights for row in earlier if row.generation == last} or {own[0].start}
        if {row.start for row in own} != committed:
            found.append(f"generation {generation}: it did not start from the weights after step {first - 1}")
    return found


def rate(rows: Sequence[Row], begin: float, end: float) -> float:
    """Images per second, also of steps that were lost later."""
    return sum(len(row.images) for row in rows if begin <= row.time < end) / (end - begin)


def recovery(rows: Sequence[Row], at: float, window: float = WINDOW) -> Recovery | None:
    """What the fault at this time cost. None while no step followed it, or not for long enough."""
    known = [row for row in rows if row.time <= at]
    # The old group may still end a step after the fault.
    new = [row for row in rows if known and row.time > at and row.group != known[-1].group]
    if not new:
        return None
    first = new[0]
    other = next((row for row in new if row.group != first.group), None)
    if not other and rows[-1].time < first.time + window:
        return None
    old = [row for row in rows if row.time < first.time]
    until = min(first.time + window, other.time) if other else first.time + window
    return Recovery(
        seconds=first.time - at,
        stood=first.time - old[-1].time,
        steps_lost=max(max(row.step for row in old) + 1 - first.step, 0),
        before=rate(rows, at - window, at),
        after=rate(rows, first.time, until),
        nodes_before=known[-1].size,
        nodes_after=first.size,
    )


def series(rows: Sequence[Row], at: float, before: int = 15) -> list[tuple[float, float]]:
    """(seconds since the fault, images per second), for every two seconds."""
    last = int(rows[-1].time - at) if rows else 0
    return [(float(second), rate(rows, at + second, at + second + 2)) for second in range(-before, last - 1, 2)]
