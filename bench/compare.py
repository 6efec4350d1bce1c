"""Compare two runs point by point: regression, improvement or noise; exit 1 on a regression."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from typing import Any

from bench import words
from bench.results import dimensions, provenance
from bench.results.points import MergedPoint, Table
from bench.results.runs import Run, load
from bench.results.trial import Interval, Point, Record
from cluster.core.errors import UserError
from cluster.core.tables import columns

Key = tuple[Any, ...]
ALWAYS = ("fabric", "nodes", "batch")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="baseline: a run folder, a trials file, or latest")
    parser.add_argument("b", metavar="B", help="the run to compare with it")
    text = "slowdown that does not count as a regression (default 5%%; or 0.05)"
    parser.add_argument("--tolerance", default="5%", metavar="SHARE", help=text)
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


class Pair(Record):
    point: str
    before: Interval
    after: Interval | None = None
    verdict: str
    change: float | None = None
    note: str = ""


def run(args: argparse.Namespace) -> int:
    tolerance = parse_tolerance(args.tolerance)
    before, after = load(args.a), load(args.b)
    report = compare(before, after, tolerance)
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 1 if report["regressions"] else 0


def parse_tolerance(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UserError(f"--tolerance: {text!r} is not a share; write 5% or 0.05 (at least 0, below 1)")
    return value


def key(point: Point) -> Key:
    """The conditions without the transport, which a run of schema 1 may not have recorded."""
    return tuple(point.model_dump(exclude={"repeat", "transport"}).values())


def row_dimensions(tables: Iterable[Table]) -> list[str]:
    """What the label of a row names: where and how many, and whatever else varies in either run."""
    found: list[Point] = []
    for table in tables:
        found += [point.conditions for point in table.points] + [trial.point for trial in table.failed]
    return [*ALWAYS, *dimensions.varying(found, without=(*ALWAYS, "repeat"))]


def judge(before: Interval, after: Interval, tolerance: float) -> tuple[str, float]:
    """A change counts when it exceeds the tolerance and the two intervals do not overlap."""
    change = after.median / before.median - 1
    apart = after.high < before.low or after.low > before.high
    if not apart or abs(change) <= tolerance:
        return "noise" if not apart else "within tolerance", change
    return ("regression" if change < 0 else "improvement"), change


def compare(before: Run, after: Run, tolerance: float) -> dict[str, Any]:
    a, b = before.table(), after.table()
    old, new = ({key(point.trials[0].point): point for point in table.points} for table in (a, b))
    broken = {key(trial.point): trial for trial in b.failed}
    names = row_dimensions((a, b))

    def where(point: MergedPoint) -> str:
        return dimensions.label(point.conditions, names)

    pairs: list[Pair] = []
    missing: list[str] = []
    for conditions, point in old.items():
        other, failed = new.get(conditions), broken.get(conditions)
        same: dict[str, Any] = {"point": where(point), "before": point.ips}
        if other is not None:
            verdict, change = judge(point.ips, other.ips, tolerance)
            pairs.append(Pair(**same, after=other.ips, verdict=verdict, change=change, note=different(point, other)))
        elif failed is not None:
            note = f"fails now: {failed.error or 'no error text'}"
            pairs.append(Pair(**same, verdict="regression", note=note))
        else:
            missing.append(where(point))
    if not pairs:
        raise UserError(f"A, B: {before.name} and {after.name} have no point in common; compare runs of the same plan")
    added = [where(point) for conditions, point in new.items() if conditions not in old]
    worse = [pair for pair in pairs if pair.verdict == "regression"]
    return {
        "a": before.name,
        "b": after.name,
        "tolerance": tolerance,
        "points": [pair.model_dump() for pair in pairs],
        "regressions": len(worse),
        "improvements": sum(pair.verdict == "improvement" for pair in pairs),
        "would_pass": passing_tolerance(worse),
        "only_in_a": missing,
        "only_in_b": added,
        "differences": provenance.differences(before.provenance, after.provenance, (*provenance.TIMES, "nodes")),
        "problems": [f"{run.name}: {text}" for run in (before, after) for text in run.problems],
        "emulated": any(point.family.kind == "emulated" for point in (*a.points, *b.points)),
    }


def different(before: MergedPoint, after: MergedPoint) -> str:
    """Which conditions changed although the point is the same."""
    pairs = {"scale factor": (before.scale, after.scale), "transport": (before.transport, after.transport)}
    return ", ".join(f"{name} {old} then {new}" for name, (old, new) in pairs.items() if old != new)


def passing_tolerance(worse: list[Pair]) -> float | None:
    """The smallest tolerance, in tenths of a per cent, without a regression; None if there is none."""
    if not worse or any(pair.change is None for pair in worse):
        return None
    deepest = max(-(pair.change or 0.0) for pair in worse)
    # Rounded up with a small margin, so that the printed figure passes.
    return math.ceil(deepest * 1000 + 1e-9) / 1000


def as_text(report: dict[str, Any]) -> str:
    lines = [f"{report['b']} against {report['a']}, images/s, tolerance {report['tolerance']:.1%}"]
    if report["emulated"]:
        lines[0] += " (emulated devices)"
    rows = [
        (
            row["point"],
            spread(row["before"]),
            spread(row["after"]),
            "" if row["change"] is None else f"{row['change']:+.1%}",
            row["verdict"] + (f" ({row['note']})" if row["note"] else ""),
        )
        for row in report["points"]
    ]
    lines.append(columns(("point", "before", "after", "change", "verdict"), rows))
    for title, name in (("Only in A", "only_in_a"), ("Only in B", "only_in_b")):
        if report[name]:
            lines.append(f"{title}: {words.several(report[name], 4)}")
    lines += [f"Differs: {text}" for text in report["differences"]]
    lines += [f"Note: {text}" for text in report["problems"]]
    worse, better, total = report["regressions"], report["improvements"], len(report["points"])
    lines.append(f"{worse} regressions, {better} improvements, {total - worse - better} unchanged.")
    if worse:
        passing = report["would_pass"]
        lines.append(
            f"--tolerance {passing:.1%} would have passed."
            if passing is not None
            else "No tolerance would have passed: a point that was measured before fails now."
        )
    return "\n".join(lines)


def spread(value: dict[str, float] | None) -> str:
    if value is None:
        return "failed"
    median, low, high = (words.significant(value[name], 4) for name in ("median", "low", "high"))
    return f"{median} ({low}-{high})"
