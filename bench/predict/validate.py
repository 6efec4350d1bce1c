"""Compare the model with every published table: measured, predicted, error, and whether the interval contains it.

Facts that the model needs and that a table lacks are stated here, next to the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.catalogue.gpu_rates import compute_ms, published
from bench.parse import OLD_TRANSPORTS, TRANSPORTS, number
from bench.predict.fit import Observation, fit_link
from bench.predict.inputs import DEFAULTS, Parameters, Setup
from bench.predict.json_values import as_object, rounded
from bench.predict.step import predict
from cluster.core import files
from cluster.core.errors import UserError
from cluster.core.tables import columns

Row = dict[str, str]
# The model was built on these tables, so their intervals have no factor for laboratories that it has never seen.
KNOWN = replace(DEFAULTS, width=1.0)


@dataclass(frozen=True)
class Checked:
    """One published row and its prediction, in the unit of the table."""

    set: str
    row: str
    unit: str
    measured: float
    predicted: float
    low: float
    high: float
    # "baseline": the row is the model's input; "fit": a ceiling was fitted on it; "predicted": neither.
    role: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high


@dataclass(frozen=True)
class Summary:
    """Errors of one table. Baselines are left out: they are exact by construction."""

    set: str
    rows: int
    mean_error: float
    max_error: float
    inside: int

    @property
    def coverage(self) -> float:
        return self.inside / self.rows


def check_all() -> list[Checked]:
    # Each GPU type of batchai was a machine type of its own, and so a cluster.
    alike = [row for name in ("hkbu-2020", "dlperf", "batchai") for row in check_table(name, published(name))]
    return [*alike, *_lowbandwidth(), *_powerai(), *_far(), *_tf_benchmarks()]


def summarise(rows: Iterable[Checked]) -> list[Summary]:
    sets: dict[str, list[Checked]] = {}
    for row in rows:
        if row.role != "baseline":
            sets.setdefault(row.set, []).append(row)
    everything = [row for members in sets.values() for row in members]
    return [_summary(name, members) for name, members in sets.items()] + [_summary("all", everything)]


def _summary(name: str, rows: list[Checked]) -> Summary:
    errors = [abs(row.error) for row in rows]
    return Summary(name, len(rows), sum(errors) / len(errors), max(errors), sum(row.inside for row in rows))


def _rate_check(
    name: str, label: str, setup: Setup, measured: float, parameters: Parameters = KNOWN, role: str = "predicted"
) -> Checked:
    got = predict(setup, parameters)
    role = "baseline" if setup.gpus == 1 else role
    return Checked(name, label, "images/s", measured, got.images_per_second, got.low, got.high, role)


def _efficiency_check(name: str, label: str, setup: Setup, base: Setup, measured: float) -> Checked:
    """Efficiency relative to the baseline of the source, in which hosts and frameworks lose the same share."""
    alike = replace(KNOWN, host_doubt=0.0)
    got, start = predict(setup, alike), predict(base, alike)
    ideal = start.images_per_second * setup.gpus / base.gpus
    role = "baseline" if setup == base else "predicted"
    share, low, high = (rate / ideal for rate in (got.images_per_second, got.low, got.high))
    return Checked(name, label, "efficiency", measured, share, low, high, role)


def check_table(name: str, rows: Sequence[Row]) -> list[Checked]:
    """Check a table of images per second by GPUs, with the columns of the published ones.

    Every cluster (GPU and fabric) has one bandwidth ceiling, fitted on its smallest multi-node rows. If these have
    several methods, the row without overlap is used: it depends on the ceiling alone.
    """
    needed = {"model", "batch", "gpus", "gpus_per_node", "fabric", "transport", "images_per_second"}
    for column in sorted(needed - set(rows[0] if rows else ())):
        raise UserError(f"--table: {name} has no column {column!r}, it needs {', '.join(sorted(needed))}")
    for line, row in enumerate(rows, start=2):
        _check_row(f"{name} line {line}", row)
    single = {_device(row): float(row["images_per_second"]) for row in rows if row["gpus"] == "1"}

    def setup(row: Row) -> Setup:
        if _device(row) not in single:
            raise UserError(f"--table: {name} has no row with 1 GPU for {', '.join(_device(row))}")
        batch, gpus, per_node = (int(row[column]) for column in ("batch", "gpus", "gpus_per_node"))
        step, via = 1000 * batch / single[_device(row)], TABLE_TRANSPORTS[row["transport"]]
        method = METHODS[row.get("method", "mgwfbp")]
        return Setup(row["model"], batch, step, gpus, per_node, _rate_of(row), via, overlap=method, gpu=row.get("gpu"))

    checked = []
    for cluster in dict.fromkeys(_cluster(row) for row in rows):
        members = [(row, setup(row)) for row in rows if _cluster(row) == cluster]
        several = [pair for pair in members if pair[1].nodes > 1]
        fewest = min((asked.gpus for _, asked in several), default=0)
        anchors = [pair for pair in several if pair[1].gpus == fewest]
        anchors = [pair for pair in anchors if pair[1].overlap == "none"] or anchors
        fitted = KNOWN
        if anchors:
            fitted = fit_link([Observation.of_rate(asked, float(row["images_per_second"])) for row, asked in anchors])
        for row, asked in members:
            kept = (row.get(column, "") for column in ("gpu", "framework", "precision", "fabric", "method", "gpus"))
            label = " ".join(word for word in kept if word)
            role = "fit" if (row, asked) in anchors else "predicted"
            checked.append(_rate_check(name, label, asked, float(row["images_per_second"]), fitted, role))
    return checked


# Tables keep the words of their sources. Intel MPI ran over InfiniBand there.
TABLE_TRANSPORTS = {name: name for name in TRANSPORTS} | OLD_TRANSPORTS | {"intelmpi": "verbs"}
METHODS = {"bsp": "none", "wfbp": "tensor", "mgwfbp": "fused"}
# Columns that describe the cluster and the method. The others describe the work of one GPU.
CLUSTER_COLUMNS = {"fabric", "transport", "method", "gpus", "gpus_per_node", "images_per_second"}


def _device(row: Row) -> tuple[str, ...]:
    return tuple(value for column, value in row.items() if column not in CLUSTER_COLUMNS)


def _cluster(row: Row) -> tuple[str, str, str]:
    return row.get("gpu", ""), row["fabric"], row["transport"]


def _rate_of(row: Row) -> float:
    """From its column, or the digits of the fabric (10gbe, ib100), or so high that the fitted ceiling decides."""
    digits = re.sub("[^0-9]", "", row["fabric"])
    return float(row.get("rate_gbps") or digits or 100)


def _check_row(where: str, row: Row) -> None:
    for column in ("batch", "gpus", "gpus_per_node"):
        if not re.fullmatch("[0-9]{1,9}", row[column]):
            raise UserError(f"--table: {where}: {column} {row[column]!r} is not a whole number")
    for column in ("images_per_second", "rate_gbps"):
        if column in row:
            number(row[column], f"--table: {where}: {column}")
    number(str(_rate_of(row)), f"--table: {where}: fabric")
    if row["transport"] not in TABLE_TRANSPORTS:
        known = ", ".join(TRANSPORTS)
        raise UserError(f"--table: {where}: transport {row['transport']!r} is not known, use one of {known}")
    if row.get("method", "bsp") not in METHODS:
        raise UserError(f"--table: {where}: method {row['method']!r} is not known, use one of {', '.join(METHODS)}")


def read_table(path: Path) -> list[Row]:
    head, *lines = files.table(path, f"--table: {path}") or [[]]
    return [dict(zip_longest(head, line[: len(head)], fillvalue="")) for line in lines if line]


def _lowbandwidth() -> Iterable[Checked]:
    rows = published("lowbandwidth")
    single = next(float(row["step_ms"]) for row in rows if row["nodes"] == "1")
    for row in rows:
        batch, nodes, per_node = (int(row[column]) for column in ("batch", "nodes", "gpus_per_node"))
        rate = float(row["rate_gbps"]) if row["rate_gbps"] else None
        gpus, codec = nodes * per_node, row["compression"]
        setup = Setup(
            row["model"], batch, single, gpus, per_node, rate, compression=codec, gpu=row["gpu"], link="limiter"
        )
        got = predict(setup, KNOWN)
        # The interval is that of the rate: its low end is the longest step.
        longest, shortest = (1000 * setup.images_per_step / rate for rate in (got.low, got.high))
        label = f"{nodes} nodes {row['rate_gbps'] or '-'} Gbit/s"
        role = "baseline" if setup.gpus == 1 else "predicted"
        yield Checked("lowbandwidth", label, "ms", float(row["step_ms"]), got.step_ms, shortest, longest, role)


# POWER8 servers with NVLink and 100 Gbit/s InfiniBand; relative to one server.
def _powerai() -> Iterable[Checked]:
    for row in published("powerai-ddl"):
        setup = _from_profile(row["model"], row["gpu"], 64, int(row["gpus"]), 4, 100.0, interconnect="nvlink")
        base = _from_profile(row["model"], row["gpu"], 64, 4, 4, 100.0, interconnect="nvlink")
        yield _efficiency_check("powerai-ddl", row["gpus"], setup, base, float(row["efficiency"]))


# GPUs per node, rate, transport, GPUs of the source's baseline. All used 32 images per GPU, reduced within nodes first
# and had a dedicated network.
FAR: dict[str, tuple[int, float, str, int]] = {
    "Goyal et al.": (8, 50.0, "tcp", 8),
    "ChainerMN": (4, 56.0, "verbs", 1),
    "Akiba et al.": (8, 112.0, "verbs", 1),
    "Sony": (4, 200.0, "verbs", 4),
    "Jia et al.": (8, 100.0, "verbs", 8),
}


def _far() -> Iterable[Checked]:
    for row in published("far"):
        per_node, rate, transport, baseline_gpus = FAR[row["system"]]
        # The P40 has no published rate here; its single-precision peak is within a tenth of the P100's.
        gpu = "p100" if row["gpu"] == "p40" else row["gpu"]
        ask: dict[str, Any] = {"transport": transport, "hierarchical": True, "interconnect": "nvlink"}
        setup = _from_profile(row["model"], gpu, 32, int(row["gpus"]), per_node, rate, **ask)
        base = _from_profile(row["model"], gpu, 32, baseline_gpus, per_node, rate, **ask)
        yield _efficiency_check("far", f"{row['system']} {row['gpus']}", setup, base, float(row["efficiency"]))


# DGX-1 within one machine; EC2 machines of 8 K80 on 10 Gbit/s with parameter servers.
DGX1: dict[str, Any] = {"engine": "horovod", "gpu": "p100", "interconnect": "nvlink"}
EC2: dict[str, Any] = {"engine": "ps", "placement": "tensors", "gpu": "k80", "interconnect": "pcie"}


def _tf_benchmarks() -> Iterable[Checked]:
    rows = published("tf-benchmarks")

    def series(row: Row) -> tuple[str, str, str]:
        return row["system"], row["model"], row["batch"]

    single = {series(row): float(row["images_per_second"]) for row in rows if row["gpus"] == "1"}
    for row in rows:
        gpus, batch = int(row["gpus"]), int(row["batch"])
        machine = EC2 if row["system"].startswith("ec2") else DGX1
        setup = Setup(row["model"], batch, 1000 * batch / single[series(row)], gpus, min(gpus, 8), 10.0, **machine)
        label = f"{row['system']} {row['model']} {batch} {row['data']} {gpus}"
        yield _rate_check("tf-benchmarks", label, setup, float(row["images_per_second"]))


def _from_profile(
    model: str, gpu: str, batch: int, gpus: int, per_node: int, rate: float, transport: str = "verbs", **more: Any
) -> Setup:
    """Efficiencies are compared, so the uncertainty of the single-GPU rate does not matter."""
    step, _ = compute_ms(gpu, model, batch)
    return Setup(model, batch, step, gpus, per_node, rate, transport, gpu=gpu, **more)


def run(path: Path | None, as_json: bool) -> int:
    """Print every row with its prediction, and a summary per table."""
    rows = check_table(path.stem, read_table(path)) if path else check_all()
    sums = summarise(rows)
    if as_json:
        answer = {
            "rows": [as_object(row) | {"error": rounded(row.error), "inside": row.inside} for row in rows],
            "sets": [as_object(one) | {"coverage": rounded(one.coverage)} for one in sums],
        }
        print(json.dumps(answer, indent=2))
        return 0
    cells = []
    for row in rows:
        low, high, measured, predicted = map(_figure, (row.low, row.high, row.measured, row.predicted))
        role = {"baseline": "input", "fit": "ceiling fitted here"}.get(row.role, "")
        inside = "yes" if row.inside else "no"
        error = f"{row.error:+.1%}"
        cells.append((row.set, row.row, measured, predicted, row.unit, error, f"{low} to {high}", inside, role))
    print(columns(("set", "row", "measured", "predicted", "unit", "error", "80% interval", "inside", ""), cells))
    print()
    lines = []
    for one in sums:
        inside = f"{one.inside} of {one.rows}, {one.coverage:.1%}"
        lines.append((one.set, one.rows, f"{one.mean_error:.1%}", f"{one.max_error:.1%}", inside))
    print(columns(("set", "rows", "mean error", "max error", "inside interval"), lines))
    print("The sums leave out rows that are the model's input: one GPU, or the configuration a source counts from.")
    return 0


def _figure(value: float) -> str:
    return f"{value:.3f}" if value < 2 else f"{value:.1f}"
