"""Which stages run beside each other, and how long the rest takes. Nothing here starts a process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Stage:
    name: str
    argv: tuple[str, ...]
    # On two cores beside the other stages, until a run on this machine gives a better figure.
    seconds: float = 10
    # Cores that it keeps busy.
    slots: float = 1
    # It compares times or rates, so another stage that does so must not run at the same time.
    measures: bool = False
    # The stage that must have passed before.
    after: str = ""
    needs_root: bool = False
    env: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)


def startable(
    waiting: Sequence[Stage],
    running: Mapping[Stage, float],
    ended: Collection[str],
    budget: float,
    expected: Callable[[Stage], float],
) -> list[Stage]:
    """The stages to start now. The order of `waiting` is the order of preference; `running` has the seconds left.

    Once a stage lacks slots, a later one starts only if it ends before there are enough: small stages must not delay a
    wide one for ever.
    """
    chosen: dict[Stage, float] = {}
    limit = math.inf
    for stage in waiting:
        now = {**running, **chosen}
        if (stage.after and stage.after not in ended) or (stage.measures and any(one.measures for one in now)):
            continue
        if now and sum(one.slots for one in now) + stage.slots > budget:
            limit = min(limit, seconds_until(now, stage.slots, budget))
        elif expected(stage) <= limit:
            chosen[stage] = expected(stage)
    return list(chosen)


def seconds_until(running: Mapping[Stage, float], slots: float, budget: float) -> float:
    """When this many slots will be free."""
    free, seconds = budget - sum(stage.slots for stage in running), 0.0
    for stage, left in sorted(running.items(), key=lambda item: item[1]):
        if free >= slots:
            break
        free, seconds = free + stage.slots, left
    return seconds


def time_left(
    waiting: Sequence[Stage],
    running: Mapping[Stage, float],
    ended: Collection[str],
    budget: float,
    expected: Callable[[Stage], float],
) -> float:
    """Seconds until all stages have ended, by playing the schedule."""
    rest, now, done, clock = list(waiting), dict(running), set(ended), 0.0
    while rest or now:
        for stage in startable(rest, now, done, budget, expected):
            rest.remove(stage)
            now[stage] = expected(stage)
        if not now:
            # What is left waits for a stage that failed.
            break
        step = min(now.values())
        clock += step
        done |= {stage.name for stage, left in now.items() if left <= step}
        now = {stage: left - step for stage, left in now.items() if left > step}
    return clock


@dataclass(frozen=True)
class Known:
    """What the last passed run of a stage on this machine took."""

    seconds: float
    tests: int


class History:
    """Seconds and number of tests of each stage, kept from run to run."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self.known = {name: Known(**one) for name, one in json.loads(file.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            self.known = {}

    def seconds(self, stage: Stage) -> float:
        return self.known[stage.name].seconds if stage.name in self.known else stage.seconds

    def tests(self, stage: Stage) -> int:
        return self.known[stage.name].tests if stage.name in self.known else 1

    def add(self, name: str, seconds: float, tests: int) -> None:
        self.known[name] = Known(round(seconds, 1), tests)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".new")
        part.write_text(json.dumps({name: vars(one) for name, one in sorted(self.known.items())}, indent=1))
        part.replace(self.file)
