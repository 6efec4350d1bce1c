"""Learn the parameters and the widths of intervals from published rows, so that a group can be judged by the others.

The model is linearised around the defaults: one derivative per row and parameter serves every choice of groups. Groups
count alike, whatever their number of rows. A prior keeps each parameter near its default.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.catalogue.measurements import Measurement
from bench.predict.inputs import DEFAULTS, Parameters, Setup
from bench.predict.published_setup import setup_of
from bench.predict.step import predict, step_ms

# Standard deviation of the priors in natural logarithms, the step of the derivative, and the largest error that counts.
PRIOR, NUDGE, MOST_ERROR = 0.55, 0.2, 0.4
# What a row's error is made of beside the parameters: frameworks, hosts, input.
NOISE = 0.12
# Share of rows that the widths are to hold. The groups differ more among each other than their rows do.
HELD = 0.85


def _priors(via: str) -> Callable[[Parameters, float], Parameters]:
    def change(parameters: Parameters, factor: float) -> Parameters:
        known = dict(parameters.prior_gbps)
        known[via] *= factor
        return replace(parameters, prior_gbps=tuple(known.items()))

    return change


def _scalar(name: str) -> Callable[[Parameters, float], Parameters]:
    return lambda parameters, factor: replace(parameters, **{name: getattr(parameters, name) * factor})


LEARNT: dict[str, Callable[[Parameters, float], Parameters]] = {
    **{
        name: _scalar(name) for name in ("jitter", "half_jitter", "node_loss", "intra", "interference", "tcp_knee_gbps")
    },
    **{name: _scalar(name) for name in ("cpu_gbytes", "server_gbytes", "grpc_gbytes", "ps_local")},
    "prior tcp": _priors("tcp"),
    "prior verbs": _priors("verbs"),
}


@dataclass(frozen=True)
class Slopes:
    """One row: logarithm of predicted over measured step time, and how it changes with each parameter."""

    row: Measurement
    error: float
    by_parameter: tuple[float, ...]


def slopes(rows: Sequence[Measurement], start: Parameters = DEFAULTS) -> list[Slopes]:
    moved = [change(start, math.exp(NUDGE)) for change in LEARNT.values()]
    found = []
    for row in rows:
        setup = setup_of(row)
        now = step_ms(setup, start)
        measured = 1000 * setup.images_per_step / row.images_per_second
        slope = tuple(math.log(step_ms(setup, other) / now) / NUDGE for other in moved)
        found.append(Slopes(row, math.log(now / measured), slope))
    return found


def learn(known: Sequence[Slopes], start: Parameters = DEFAULTS) -> Parameters:
    """The parameters that fit these rows best, near the start."""
    size = len(LEARNT)
    groups = Counter(one.row.laboratory for one in known)
    matrix = [[1 / PRIOR**2 if i == j else 0.0 for j in range(size)] for i in range(size)]
    vector = [0.0] * size
    for one in known:
        # As much information as ten independent rows per group.
        weight = 10 / groups[one.row.laboratory] / NOISE**2
        error = max(-MOST_ERROR, min(MOST_ERROR, one.error))
        for i, slope in enumerate(one.by_parameter):
            vector[i] -= weight * slope * error
            for j, other in enumerate(one.by_parameter):
                matrix[i][j] += weight * slope * other
    for change, move in zip(LEARNT.values(), solve(matrix, vector), strict=True):
        # The derivative holds nearby only.
        start = change(start, math.exp(max(-1.0, min(1.0, move))))
    return start


def solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gauss elimination; the matrix is symmetric and positive."""
    rows = [[*line, value] for line, value in zip(matrix, vector, strict=True)]
    size = len(rows)
    for i in range(size):
        pivot = rows[i][i]
        for k in range(i + 1, size):
            factor = rows[k][i] / pivot
            rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found


def misses(pairs: Sequence[tuple[Setup, float]], parameters: Parameters) -> dict[str, list[float]]:
    """By kind: the error of each row in units of the half of the interval that it lies in."""
    found: dict[str, list[float]] = {}
    for setup, images_per_second in pairs:
        got = predict(setup, replace(parameters, width=1.0))
        off = math.log(images_per_second / got.images_per_second)
        half = math.log(got.high / got.images_per_second) if off > 0 else math.log(got.images_per_second / got.low)
        found.setdefault(setup.kind, []).append(abs(off) / max(half, 1e-9))
    return found


def widths(by_group: Mapping[str, dict[str, list[float]]], without: str) -> dict[str, float]:
    """Factor on the interval per kind that holds most rows of the other groups. Groups count alike."""
    found = {}
    for name in {name for misses in by_group.values() for name in misses}:
        weighted = [
            (miss, 1 / math.sqrt(len(misses[name])))
            for group, misses in by_group.items()
            if group != without and name in misses
            for miss in misses[name]
        ]
        found[name] = quantile(weighted, HELD) if weighted else 1.0
    return found


def quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    total, seen = sum(weight for _, weight in weighted), 0.0
    for value, weight in sorted(weighted):
        seen += weight
        if seen >= share * total:
            return value
    return max(value for value, _ in weighted)
