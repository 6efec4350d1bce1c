"""Cut a network into stages: the cut of its graph of units, the order in which stages work, and how long they take."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from bench.catalogue import models, units
from cluster.core.errors import UserError

SCHEDULES = ("1f1b", "gpipe")
# Micro-batches per stage, if the plan does not say: the bubble is then about a fifth.
MICRO_BATCHES_PER_STAGE = 4


@dataclass(frozen=True)
class Stage:
    """Units first to last, without last."""

    first: int
    last: int
    names: tuple[str, ...]
    share: float  # of the network's compute
    parameters: int
    sends: int  # values per sample to the stages behind it
    shares_parameters: int  # parameters that another stage holds too: their gradients are added up once per step

    @property
    def label(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} .. {self.names[-1]}"


# Whether a stage of these units, at this position of the pipeline, is possible.
Fits = Callable[[int, int, int], bool]
# Times to send one value, in units of the time that the whole network computes on one sample: from a link that costs
# nothing to one that decides alone. They do not depend on the link at hand: so a faster one never gets a slower step.
PRICES = (0.0, *(10 ** (exponent / 2) for exponent in range(-18, -8)))
# What such a stage costs.
Cost = Callable[[int, int, int], float]


def always(position: int, first: int, last: int) -> bool:
    return True


def check_stages(model: str, stages: int, field: str) -> None:
    known = len(units.of(model))
    if not 1 <= stages <= known:
        raise UserError(
            f"{field}: {stages} stages, but {model} has {known} layers to cut between; use {known} or fewer"
        )


@cache
def cut(model: str, stages: int, seq_len: int | None = None, per_value: float = 0.0) -> tuple[Stage, ...]:
    """The cut whose slowest stage or edge is fastest; of equal ones, that with the most equal stages.

    per_value: time to send one value, in units of the time that the whole network computes on one sample.
    """
    return best_cut(model, stages, seq_len, per_value, always)


def fastest_cut(
    model: str, stages: int, seq_len: int | None, step_ms: Callable[[tuple[Stage, ...]], float], fits: Fits = always
) -> tuple[Stage, ...]:
    """Of the cuts that suit some link, that with the fastest step."""
    return min(dict.fromkeys(best_cut(model, stages, seq_len, price, fits) for price in PRICES), key=step_ms)


def best_cut(model: str, stages: int, seq_len: int | None, per_value: float, fits: Fits) -> tuple[Stage, ...]:
    check_stages(model, stages, "--devices")
    network, parts = units.graph(model, seq_len), units.of(model, seq_len)
    count, total = len(parts), sum(unit.macs for unit in parts)
    before = [sum(unit.macs for unit in parts[:at]) / total for at in range(count + 1)]
    sent = [units.crossing(network, range(at))[0] if 0 < at < count else 0 for at in range(count + 1)]

    def slowest(position: int, first: int, last: int) -> float:
        return max(before[last] - before[first], sent[last] * per_value)

    def unequal(position: int, first: int, last: int) -> float:
        return (before[last] - before[first]) ** 2 if slowest(position, first, last) <= limit else math.inf

    ends, limit = _ends(count, stages, slowest, max, fits)
    if ends is None:
        raise UserError(
            f"--memory-gb: no cut of {model} into {stages} stages fits; use more devices or a smaller batch"
        )
    # Many cuts have the same slowest part, where an edge is the limit: take the most equal stages among them.
    ends, _ = _ends(count, stages, unequal, operator.add, fits)
    return tuple(stage(model, seq_len, first, last) for first, last in pairwise(ends or []))


def _ends(
    count: int, stages: int, cost: Cost, combine: Callable[[float, float], float], fits: Fits
) -> tuple[list[int] | None, float]:
    """Ends of the stages with the least combined cost, and that cost; None if no cut fits."""
    # best[at]: the least cost with the first `at` units in the stages so far.
    best = [0.0, *[math.inf] * count]
    choice: list[list[int]] = []
    for position in range(stages):
        now, came = [math.inf] * (count + 1), [0] * (count + 1)
        for last in range(position + 1, count - (stages - position - 1) + 1):
            for first in range(position, last):
                if best[first] == math.inf or not fits(position, first, last):
                    continue
                found = combine(best[first], cost(position, first, last))
                if found < now[last]:
                    now[last], came[last] = found, first
        best = now
        choice.append(came)
    if best[count] == math.inf:
        return None, math.inf
    ends = [count]
    for came in reversed(choice):
        ends.append(came[ends[-1]])
    return ends[::-1], best[count]


def stage(model: str, seq_len: int | None, first: int, last: int) -> Stage:
    network, parts = units.graph(model, seq_len), units.of(model, seq_len)
    inside = parts[first:last]
    ends = {0, len(parts) - 1}
    shared = units.tied(model, seq_len) if len(ends & set(range(first, last))) == 1 else 0
    # The last unit of a tied network holds a copy of the table.
    held = sum(unit.parameters for unit in inside) + (shared if last == len(parts) else 0)
    sends = units.crossing(network, range(last))[0] if last < len(parts) else 0
    share = sum(unit.macs for unit in inside) / models.get(model, seq_len).macs
    return Stage(first, last, tuple(unit.name for unit in inside), share, held, sends, shared)


def order(schedule: str, position: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """What a stage does one after the other: F and B of each micro-batch."""
    if schedule == "gpipe":
        return [(kind, k) for kind in "FB" for k in range(micro_batches)]
    ahead = min(micro_batches, stages - position)
    found = [("F", k) for k in range(ahead)]
    for k in range(micro_batches):
        found.append(("B", k))
        if ahead + k < micro_batches:
            found.append(("F", ahead + k))
    return found


def pipeline_ms(
    work: Sequence[float], edges: Sequence[float], schedule: str, pieces: int, backward_share: float = 2 / 3
) -> float:
    """Time until every stage has done its order of work. A link sends one tensor at a time in each direction."""
    deep = len(work)
    orders = [order(schedule, at, deep, pieces) for at in range(deep)]
    arrived: dict[tuple[int, str, int], float] = {(0, "F", k): 0.0 for k in range(pieces)}
    clock, at = [0.0] * deep, [0] * deep
    down, up = [0.0] * deep, [0.0] * deep
    while any(at[s] < len(orders[s]) for s in range(deep)):
        for s in range(deep):
            while at[s] < len(orders[s]):
                kind, k = orders[s][at[s]]
                if (s, kind, k) not in arrived and not (kind == "B" and s == deep - 1):
                    break
                share = backward_share if kind == "B" else 1 - backward_share
                clock[s] = max(clock[s], arrived.get((s, kind, k), 0.0)) + share * work[s]
                if kind == "F" and s + 1 < deep:
                    down[s] = max(down[s], clock[s]) + edges[s]
                    arrived[s + 1, "F", k] = down[s]
                if kind == "B" and s > 0:
                    up[s] = max(up[s], clock[s]) + edges[s - 1]
                    arrived[s - 1, "B", k] = up[s]
                at[s] += 1
    return max(clock)


def kept(schedule: str, position: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage keeps at a time."""
    return micro_batches if schedule == "gpipe" else min(micro_batches, stages - position)


def micro_batches(stages: int, samples: int) -> int:
    """The usual number: a divisor of the samples of a step, at most four per stage."""
    most = MICRO_BATCHES_PER_STAGE * stages
    return max(count for count in range(1, min(most, samples) + 1) if samples % count == 0)
