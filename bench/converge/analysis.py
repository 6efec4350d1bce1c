"""What the trainings of a plan say: time and samples to the target, and the two questions, with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.results.dimensions import ENGINE_NAMES

Row = dict[str, Any]
# Of an emulated step from the predicted one.
STEP_TOLERANCE = 0.25


@dataclass(frozen=True)
class Estimate:
    """A geometric mean over the seeds, with its 95% interval; the ends are None with a single seed."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        return f"{self.value:.3g}" + ("" if self.low is None else f" ({self.low:.3g} to {self.high:.3g})")


def estimate(values: Sequence[float]) -> Estimate:
    from scipy.stats import t

    logs = [math.log(value) for value in values]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return Estimate(math.exp(middle), None, None)
    half = float(t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def reached(row: Row, field: str) -> list[float]:
    """Of each training that reached the target, in the order of seeds."""
    return [run[field] for run in row["runs"] if run[field] is not None]


def all_reached(row: Row) -> bool:
    return bool(row["runs"]) and all(run["reached_s"] is not None for run in row["runs"])


def to_target(row: Row, field: str) -> Estimate | None:
    """None if a training did not reach the target."""
    return estimate(reached(row, field)) if all_reached(row) else None


def ratio(row: Row, base: Row, field: str) -> Estimate | None:
    """Over the first row, seed by seed: the same seed has the same first weights and the same order of images."""
    if not (all_reached(row) and all_reached(base)):
        return None
    mine, theirs = ({run["seed"]: run[field] for run in one["runs"]} for one in (row, base))
    return estimate([mine[seed] / theirs[seed] for seed in mine if seed in theirs])


def name(row: Row) -> str:
    engine = str(row["engine"])
    return "Horovod" if engine == "horovod" else ENGINE_NAMES.get(engine, engine)


def compared(rows: list[Row], batch: int) -> dict[tuple[str, int], list[Row]]:
    """(fabric, nodes) -> rows that differ in their engine only; the first is what the others are compared with."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row["batch"] == batch:
            groups.setdefault((row["fabric"], row["nodes"]), []).append(row)
    return groups


def faster(rows: list[Row], batch: int) -> list[str]:
    """Does any method beat the first in time to the target? One sentence per fabric and number of nodes."""
    said = []
    for (fabric, nodes), (base, *others) in compared(rows, batch).items():
        where = f"{fabric}, {nodes} nodes"
        if not all_reached(base):
            missed = sum(run["reached_s"] is None for run in base["runs"])
            said.append(f"{where}: {name(base)} missed the target in {missed} of {len(base['runs'])} trainings")
            continue
        parts = []
        for row in others:
            found = ratio(row, base, "reached_s")
            if found is None:
                missed = sum(run["reached_s"] is None for run in row["runs"])
                parts.append(f"{name(row)} missed the target in {missed} of {len(row['runs'])} trainings")
            elif found.low is None or found.high is None or found.low <= 1 <= found.high:
                parts.append(f"{name(row)} cannot be told from it: {found} of its time")
            else:
                parts.append(f"{name(row)} is {'faster' if found.high < 1 else 'slower'}: {found} of its time")
        said.append(f"{where}, against {name(base)} ({to_target(base, 'reached_s')} s): {'; '.join(parts)}")
    return said


def fastest(rows: list[Row], batch: int) -> list[str]:
    said = []
    for (fabric, nodes), group in compared(rows, batch).items():
        times = {name(row): found for row in group if (found := to_target(row, "reached_s"))}
        if not times:
            said.append(f"{fabric}, {nodes} nodes: no engine reached the target with every seed")
            continue
        best = min(times, key=lambda one: times[one].value)
        others = [
            name(row)
            for row in group
            if name(row) in times and name(row) != best and overlaps(row, next(r for r in group if name(r) == best))
        ]
        tie = f"; cannot be told from {', '.join(others)}" if others else ""
        said.append(f"{fabric}, {nodes} nodes: {best}, {times[best]} s{tie}")
    return said


def overlaps(row: Row, best: Row) -> bool:
    found = ratio(row, best, "reached_s")
    return found is None or found.low is None or found.low <= 1


def large_batches(rows: list[Row]) -> list[str]:
    """How many more samples do large batches need than the smallest batch of the same engine?"""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["engine"], row["fabric"], row["nodes"]), []).append(row)
    said = []
    for (_, fabric, nodes), group in groups.items():
        if len(group) < 2:
            continue
        base, *larger = sorted(group, key=lambda row: int(row["batch"]))
        parts = []
        for row in larger:
            found = ratio(row, base, "reached_samples")
            total = row["batch"] * nodes
            if found:
                parts.append(f"{total} images: {found} times as many")
            else:
                missed = sum(run["reached_s"] is None for run in row["runs"])
                least = max((run["samples"][-1] for run in row["runs"]), default=0)
                text = f"target missed in {missed} of {len(row['runs'])} trainings of {least} images"
                parts.append(f"{total} images: {text}")
        first = to_target(base, "reached_samples")
        said.append(
            f"{name(base)} on {fabric}, {nodes} nodes, against a batch of {base['batch'] * nodes} images in all "
            f"({first or 'target missed'} samples): {'; '.join(parts)}"
        )
    return said


def step_ms(row: Row) -> float:
    """Median over the trainings; 0 without any."""
    return statistics.median(run["step_ms"] for run in row["runs"]) if row["runs"] else 0.0


def staleness(row: Row) -> tuple[float, int] | None:
    """Mean and largest of all updates of a row."""
    counts: dict[int, int] = {}
    for run in row["runs"]:
        for updates, count in run["staleness"].items():
            counts[int(updates)] = counts.get(int(updates), 0) + count
    if not counts:
        return None
    return sum(updates * count for updates, count in counts.items()) / sum(counts.values()), max(counts)


def same_results(rows: list[Row]) -> list[str]:
    """Whether a synchronous engine learns the same on two fabrics: time does not enter its mathematics."""
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        if row["engine"] in ("horovod", "ddp", "ps", "local-sgd"):
            groups.setdefault((row["engine"], row["nodes"], row["batch"]), []).append(row)
    said = []
    for (_, nodes, batch), group in groups.items():
        if len(group) < 2:
            continue
        pairs = [{run["seed"]: (run["accuracy"], run["digest"]) for run in row["runs"]} for row in group]
        common = set.intersection(*(set(pair) for pair in pairs))
        equal = sum(len({repr(pair[seed]) for pair in pairs}) == 1 for seed in common)
        where = " and ".join(row["fabric"] for row in group)
        said.append(
            f"{name(group[0])}, {nodes} nodes, batch {batch}: {equal} of {len(common)} seeds end with the same "
            f"weights, bit for bit, on {where}"
        )
    return said


def problems(rows: list[Row]) -> list[str]:
    said = []
    for row in rows:
        found, wanted = step_ms(row), row["predicted_step_ms"]
        if found and abs(found / wanted - 1) > STEP_TOLERANCE:
            text = f"a step took {found:.0f} ms, predicted are {wanted:.0f}: its times are not those of the named model"
            said.append(f"{name(row)}, {row['fabric']}, {row['nodes']} nodes, batch {row['batch']}: {text}")
        for run in row["runs"]:
            where = f"{name(row)}, {row['fabric']}, {row['nodes']} nodes, batch {row['batch']}, seed {run['seed']}"
            if run["overrun"] > 0.05:
                text = "of the steps this machine computed longer than the emulated device: its times are too long"
                said.append(f"{where}: in {run['overrun']:.0%} {text}")
            if not run["proved"]:
                sent, expected = run["sent_bytes"] / 1e3, run["expected_bytes"] / 1e3
                said.append(f"{where}: a node sent {sent:.0f} kB per step, expected {expected:.0f}")
    return said


def answers(rows: list[Row], batch: int) -> dict[str, list[str]]:
    return {
        "fastest way to the target": fastest(rows, batch),
        "does any method beat the first engine in time to the target?": faster(rows, batch),
        "how many more samples do large batches need?": large_batches(rows),
        "same seed, same result": same_results(rows),
        "problems": problems(rows),
    }
