"""Hold the model against every published table: measured, predicted, error, and whether the interval holds it.

What a table does not say about its cluster and the model needs is stated here, next to the set it belongs to.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from bench import devices
from bench.predict.fit import Observation, fit_ceiling
from bench.predict.step import DEFAULTS, Parameters, Setup, predict

Row = dict[str, str]


@dataclass(frozen=True)
class Checked:
    """One published row against its prediction, in the table's own unit."""

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
    """A set's errors over all its rows but the baselines, which are right by construction."""

    set: str
    rows: int
    mean_error: float
    max_error: float
    inside: int

    @property
    def coverage(self) -> float:
        return self.inside / self.rows


@cache
def table(name: str) -> tuple[Row, ...]:
    text = resources.files("bench").joinpath("published", name).read_text()
    return tuple(csv.DictReader(text.splitlines()))


def check_all() -> list[Checked]:
    checks: tuple[Callable[[], Iterable[Checked]], ...] = (
        _hkbu,
        _dlperf,
        _batchai,
        _lowbandwidth,
        _powerai,
        _far,
        _tf_benchmarks,
    )
    return [row for check in checks for row in check()]


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
    name: str, label: str, setup: Setup, measured: float, parameters: Parameters = DEFAULTS, role: str = "predicted"
) -> Checked:
    got = predict(setup, parameters)
    role = "baseline" if setup.gpus == 1 else role
    return Checked(name, label, "images/s", measured, got.images_per_second, got.low, got.high, role)


def _efficiency_check(name: str, label: str, setup: Setup, base: Setup, measured: float) -> Checked:
    """Efficiency against the configuration that the source counted from."""
    got, start = predict(setup), predict(base)
    ideal = start.images_per_second * setup.gpus / base.gpus
    role = "baseline" if setup == base else "predicted"
    return Checked(
        name, label, "efficiency", measured, got.images_per_second / ideal, got.low / ideal, got.high / ideal, role
    )


def _observed(setup: Setup, images_per_second: float) -> Observation:
    return Observation(setup, 1000 * setup.images_per_step / images_per_second)


# One ceiling per fabric, fitted on the 8-GPU row of the method without overlap: there it shows undisturbed.
def _hkbu() -> Iterable[Checked]:
    rows = table("hkbu-2020.csv")
    rates = {"10gbe": 10.0, "ib100": 100.0, "100gbe": 100.0}
    overlap = {"bsp": "none", "wfbp": "tensor", "mgwfbp": "fused"}
    single = next(float(row["images_per_second"]) for row in rows if row["gpus"] == "1")

    def setup(row: Row) -> Setup:
        batch = int(row["batch"])
        return Setup(
            model=row["model"],
            batch=batch,
            single_step_ms=1000 * batch / single,
            gpus=int(row["gpus"]),
            gpus_per_node=int(row["gpus_per_node"]),
            rate_gbps=rates[row["fabric"]],
            transport=row["transport"],
            overlap=overlap[row["method"]],
        )

    for fabric in rates:
        members = [row for row in rows if row["fabric"] == fabric]
        anchor = next(row for row in members if row["gpus"] == "8" and row["method"] == "bsp")
        fitted = fit_ceiling([_observed(setup(anchor), float(anchor["images_per_second"]))])
        for row in members:
            label = f"{fabric} {row['method']} {row['gpus']}"
            role = "fit" if row is anchor else "predicted"
            yield _rate_check("hkbu-2020", label, setup(row), float(row["images_per_second"]), fitted, role)


# One cluster, one transport, so one ceiling: fitted on the 16-GPU rows of its three series together.
def _dlperf() -> Iterable[Checked]:
    rows = table("dlperf.csv")
    series = [(row["framework"], row["precision"]) for row in rows]
    single = {key: float(row["images_per_second"]) for key, row in zip(series, rows, strict=True) if row["gpus"] == "1"}

    def setup(row: Row) -> Setup:
        batch = int(row["batch"])
        return Setup(
            model=row["model"],
            batch=batch,
            single_step_ms=1000 * batch / single[row["framework"], row["precision"]],
            gpus=int(row["gpus"]),
            gpus_per_node=int(row["gpus_per_node"]),
            rate_gbps=100.0,
            transport=row["transport"],
            gpu="v100",
        )

    anchors = [row for row in rows if row["gpus"] == "16"]
    fitted = fit_ceiling([_observed(setup(row), float(row["images_per_second"])) for row in anchors])
    for row in rows:
        label = f"{row['framework']} {row['precision']} {row['gpus']}"
        role = "fit" if row in anchors else "predicted"
        yield _rate_check("dlperf", label, setup(row), float(row["images_per_second"]), fitted, role)


# Each GPU type was a machine type, so a cluster, of its own; Intel MPI over InfiniBand copies through host memory.
def _batchai() -> Iterable[Checked]:
    rows = table("batchai.csv")
    single = {row["gpu"]: float(row["images_per_second"]) for row in rows if row["gpus"] == "1"}

    def setup(row: Row) -> Setup:
        batch = int(row["batch"])
        return Setup(
            model=row["model"],
            batch=batch,
            single_step_ms=1000 * batch / single[row["gpu"]],
            gpus=int(row["gpus"]),
            gpus_per_node=int(row["gpus_per_node"]),
            rate_gbps=56.0 if row["fabric"] == "ib" else 40.0,
            transport="tcp" if row["transport"] == "tcp" else "rdma",
            gpu=row["gpu"],
        )

    for gpu, transport in dict.fromkeys((row["gpu"], row["transport"]) for row in rows):
        members = [row for row in rows if (row["gpu"], row["transport"]) == (gpu, transport)]
        anchor = next(row for row in members if row["gpus"] == "8")
        fitted = fit_ceiling([_observed(setup(anchor), float(anchor["images_per_second"]))])
        for row in members:
            label = f"{gpu} {transport} {row['gpus']}"
            role = "fit" if row is anchor else "predicted"
            yield _rate_check("batchai", label, setup(row), float(row["images_per_second"]), fitted, role)


def _lowbandwidth() -> Iterable[Checked]:
    rows = table("lowbandwidth.csv")
    single = next(float(row["step_ms"]) for row in rows if row["nodes"] == "1")
    for row in rows:
        per_node = int(row["gpus_per_node"])
        setup = Setup(
            model=row["model"],
            batch=int(row["batch"]),
            single_step_ms=single,
            gpus=int(row["nodes"]) * per_node,
            gpus_per_node=per_node,
            rate_gbps=float(row["rate_gbps"]) if row["rate_gbps"] else None,
            compression=row["compression"],
            gpu=row["gpu"],
        )
        got = predict(setup)
        # The interval is of the rate; the slow end of one is the long end of the other.
        longest, shortest = (1000 * setup.images_per_step / rate for rate in (got.low, got.high))
        label = f"{row['nodes']} nodes {row['rate_gbps'] or '-'} Gbit/s"
        role = "baseline" if setup.gpus == 1 else "predicted"
        yield Checked("lowbandwidth", label, "ms", float(row["step_ms"]), got.step_ms, shortest, longest, role)


# POWER8 servers with NVLink and 100 Gbit/s InfiniBand; counted from one server.
def _powerai() -> Iterable[Checked]:
    for row in table("powerai-ddl.csv"):
        setup = _from_profile(row["model"], row["gpu"], 64, int(row["gpus"]), 4, 100.0, interconnect="nvlink")
        base = _from_profile(row["model"], row["gpu"], 64, 4, 4, 100.0, interconnect="nvlink")
        yield _efficiency_check("powerai-ddl", row["gpus"], setup, base, float(row["efficiency"]))


# GPUs per node, rate, transport, GPUs that the source counted from. All ran 32 images per GPU, reduced within nodes
# first, and had a network of their own.
FAR: dict[str, tuple[int, float, str, int]] = {
    "Goyal et al.": (8, 50.0, "tcp", 8),
    "ChainerMN": (4, 56.0, "rdma", 1),
    "Akiba et al.": (8, 112.0, "rdma", 1),
    "Sony": (4, 200.0, "rdma", 4),
    "Jia et al.": (8, 100.0, "rdma", 8),
}


def _far() -> Iterable[Checked]:
    for row in table("far.csv"):
        per_node, rate, transport, counted_from = FAR[row["system"]]
        # The P40 has no published rate here; its single-precision peak is within a tenth of the P100's.
        gpu = "p100" if row["gpu"] == "p40" else row["gpu"]
        ask: dict[str, Any] = {"transport": transport, "hierarchical": True, "interconnect": "nvlink"}
        setup = _from_profile(row["model"], gpu, 32, int(row["gpus"]), per_node, rate, **ask)
        base = _from_profile(row["model"], gpu, 32, counted_from, per_node, rate, **ask)
        yield _efficiency_check("far", f"{row['system']} {row['gpus']}", setup, base, float(row["efficiency"]))


# DGX-1 within one machine; EC2 machines of 8 K80 on 10 Gbit/s with parameter servers.
def _tf_benchmarks() -> Iterable[Checked]:
    rows = table("tf-benchmarks.csv")

    def series(row: Row) -> tuple[str, str, str]:
        return row["system"], row["model"], row["batch"]

    single = {series(row): float(row["images_per_second"]) for row in rows if row["gpus"] == "1"}
    for row in rows:
        gpus, batch = int(row["gpus"]), int(row["batch"])
        servers = row["system"].startswith("ec2")
        setup = Setup(
            model=row["model"],
            batch=batch,
            single_step_ms=1000 * batch / single[series(row)],
            gpus=gpus,
            gpus_per_node=min(gpus, 8),
            rate_gbps=10.0,
            engine="ps" if servers else "horovod",
            gpu="k80" if servers else "p100",
            interconnect="pcie" if servers else "nvlink",
        )
        label = f"{row['system']} {row['model']} {batch} {row['data']} {gpus}"
        yield _rate_check("tf-benchmarks", label, setup, float(row["images_per_second"]))


def _from_profile(
    model: str, gpu: str, batch: int, gpus: int, per_node: int, rate: float, transport: str = "rdma", **more: Any
) -> Setup:
    """The efficiency is what is compared, so a doubt about the single-GPU rate has no part in the interval."""
    step, _ = devices.compute_ms(gpu, model, batch)
    return Setup(model, batch, step, gpus, per_node, rate, transport, gpu=gpu, **more)
