"""Judge the model by laboratory: parameters and widths are fitted without the group that is judged.

Cold: a prediction without any measured row of its series. Anchored: fitted on the smallest multi-node row of the
series. Parameter servers: cold for a series, with the other series of the same cluster known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.catalogue import measurements
from bench.catalogue.measurements import Measurement
from bench.predict import learn
from bench.predict.fit import anchor
from bench.predict.inputs import Parameters
from bench.predict.published_setup import observation_of, setup_of
from bench.predict.step import predict
from cluster.core.tables import columns

KINDS = ("one node", "rate stated", "rate not stated", "parameter servers")
WORTH_BEATING = 0.95


@dataclass(frozen=True)
class Judged:
    row: Measurement
    kind: str
    how: str
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.row.images_per_second - 1

    @property
    def inside(self) -> bool:
        return self.low <= self.row.images_per_second <= self.high


@dataclass(frozen=True)
class Line:
    """One line of the table: a laboratory and a kind of row."""

    laboratory: str
    kind: str
    how: str
    rows: int
    mean_error: float
    worst: float
    inside: int


def judge_all() -> list[Judged]:
    rows = [row for row in measurements.every() if not row.outlier]
    known = learn.slopes(rows)
    laboratories = list(dict.fromkeys(row.laboratory for row in rows))
    fitted = {name: learn.learn([one for one in known if one.row.laboratory != name]) for name in laboratories}
    groups = {name: [row for row in rows if row.laboratory == name] for name in laboratories}
    cold = {name: [*_cold(groups[name], fitted[name])] for name in laboratories}
    anchored = {name: [*_anchored(groups[name], fitted[name])] for name in laboratories}
    return [*_with_widths(cold), *_with_widths(anchored)]


Guess = tuple[Measurement, str, Parameters]


def _cold(rows: Sequence[Measurement], parameters: Parameters) -> list[Guess]:
    found: list[Guess] = []
    clusters: dict[tuple[object, ...], list[Measurement]] = {}
    for row in rows:
        clusters.setdefault(_cluster(row), []).append(row)
    fits: dict[tuple[object, ...], Parameters] = {}
    for row in rows:
        if row.engine != "ps" or row.nodes == 1:
            found.append((row, "cold", parameters))
            continue
        # The other series of this cluster tell its bandwidth.
        key = (_cluster(row), row.series)
        if key not in fits:
            others = [one for one in clusters[_cluster(row)] if one.series != row.series and one.nodes > 1]
            fits[key] = anchor([observation_of(one) for one in others], parameters) if others else parameters
        found.append((row, "cold", fits[key]))
    return found


def _cluster(row: Measurement) -> tuple[object, ...]:
    return row.engine, row.gpu, row.gpus_per_node, row.rate_gbps, row.transport


def _anchored(rows: Sequence[Measurement], parameters: Parameters) -> list[Guess]:
    series: dict[tuple[object, ...], list[Measurement]] = {}
    for row in rows:
        if row.nodes > 1:
            series.setdefault(row.series, []).append(row)
    found: list[Guess] = []
    for members in series.values():
        first, *others = sorted(members, key=lambda row: row.gpus)
        if others:
            fit = anchor([observation_of(first)], parameters)
            found += [(row, "anchored", fit) for row in others]
    return found


def _with_widths(guesses: dict[str, list[Guess]]) -> list[Judged]:
    missed: dict[str, dict[str, list[float]]] = {}
    for name, members in guesses.items():
        for row, _, parameters in members:
            for kind, miss in learn.misses([(setup_of(row), row.images_per_second)], parameters).items():
                missed.setdefault(name, {}).setdefault(kind, []).extend(miss)
    judged = []
    for name, members in guesses.items():
        wide = learn.widths(missed, without=name)
        for row, how, parameters in members:
            setup = setup_of(row)
            kind = setup.kind
            got = predict(setup, replace(parameters, width=wide[kind]))
            judged.append(Judged(row, kind, how, got.images_per_second, got.low, got.high))
    return judged


def table(judged: Sequence[Judged]) -> list[Line]:
    cells: dict[tuple[str, str, str], list[Judged]] = {}
    for one in judged:
        cells.setdefault((one.row.laboratory, one.kind, one.how), []).append(one)
    lines = []
    for (laboratory, kind, how), members in cells.items():
        errors = [abs(one.error) for one in members]
        inside = sum(one.inside for one in members)
        lines.append(Line(laboratory, kind, how, len(members), sum(errors) / len(errors), max(errors), inside))
    return sorted(lines, key=lambda line: (line.how != "cold", KINDS.index(line.kind), line.laboratory))


def summary(judged: Sequence[Judged]) -> dict[str, float]:
    """The promises: mean over groups of the mean error per group, and how many rows lie inside the interval."""
    lines = table(judged)

    def mean(members: Iterable[Judged]) -> float:
        groups: dict[str, list[float]] = {}
        for one in members:
            groups.setdefault(one.row.laboratory, []).append(abs(one.error))
        return sum(sum(errors) / len(errors) for errors in groups.values()) / len(groups)

    def chosen(how: str, *kinds: str) -> list[Judged]:
        return [one for one in judged if one.how == how and one.kind in kinds]

    found = {
        "cold, rate stated": mean(chosen("cold", "rate stated")),
        "cold, rate not stated": mean(chosen("cold", "rate not stated")),
        "anchored": mean(chosen("anchored", "rate stated", "rate not stated")),
    }
    for name, byteps in (("BytePS", True), ("TensorFlow", False)):
        for how in ("cold", "anchored"):
            members = [one for one in chosen(how, "parameter servers") if one.row.nodes > 1]
            found[f"parameter servers, {name}, {how}"] = mean(m for m in members if ("byteps" in m.row.note) == byteps)
    for laboratory in ("hkbu", "nvidia"):
        bert = [
            one
            for one in judged
            if (one.how, one.row.laboratory) == ("cold", laboratory)
            and one.row.model.startswith("bert")
            and one.row.engine != "ps"
        ]
        constant = [WORTH_BEATING * one.row.single * one.row.gpus / one.row.images_per_second - 1 for one in bert]
        found[f"BERT, {laboratory}"] = sum(abs(one.error) for one in bert) / len(bert)
        found[f"BERT, {laboratory}, constant efficiency {WORTH_BEATING}"] = sum(map(abs, constant)) / len(constant)
    found["inside the interval"] = sum(line.inside for line in lines) / sum(line.rows for line in lines)
    return found


def run(as_json: bool) -> int:
    judged = judge_all()
    lines, sums = table(judged), summary(judged)
    outliers = [row for row in measurements.every() if row.outlier]
    if as_json:
        answer = {
            "groups": [vars(line) for line in lines],
            "summary": sums,
            "outliers": [f"{row.source} {row.model} {row.gpus} GPUs" for row in outliers],
        }
        print(json.dumps(answer, indent=2))
        return 0
    cells = [
        (line.laboratory, line.kind, line.how, line.rows, f"{line.mean_error:.1%}", f"{line.worst:.0%}", line.inside)
        for line in lines
    ]
    print(columns(("laboratory", "rows are", "prediction", "rows", "mean error", "worst", "inside"), cells))
    print()
    print(columns(("mean over the groups", ""), [(name, f"{value:.1%}") for name, value in sums.items()]))
    print(f"\nOutliers according to their sources, left out: {len(outliers)}")
    for row in outliers:
        print(f"  {row.source}: {row.model}, {row.gpus} {row.gpu}, {row.images_per_second:g} images/s")
    return 0
