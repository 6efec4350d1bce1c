"""Fit the model to a measured run of ours, so that a few nodes predict many.

Three quantities are fitted, in ratio to their defaults: the share of the link that each fabric reaches, the mean delay
of a GPU, and the latency of a collective. Each is held to its default by a loose prior, so that a run of three points
moves what it can tell about and leaves the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from bench.predict.step import DEFAULTS, Parameters, Setup, step_ms
from bench.trial import Point, Trial
from cluster.errors import UserError

# Standard deviations of the priors, in natural logarithms, and the least doubt about a measurement.
PRIOR_LINK, PRIOR_JITTER, PRIOR_LATENCY = 0.5, 0.7, 0.7
LEAST_NOISE = 0.01
NORMAL_80 = 1.2816


@dataclass(frozen=True)
class Series:
    """What stays the same along one curve of a run."""

    fabric: str
    rate_gbps: float
    gpus_per_node: int
    batch: int
    model: str
    engine: str
    compression: str
    device: str


@dataclass(frozen=True)
class Residual:
    """A measured point against the fitted model."""

    series: Series
    nodes: int
    gpus: int
    measured_ms: float
    fitted_ms: float
    held_out: bool

    @property
    def error(self) -> float:
        """Of the rate, as everywhere else: positive is optimistic."""
        return self.measured_ms / self.fitted_ms - 1


@dataclass(frozen=True)
class Calibration:
    run: str
    parameters: dict[str, Parameters]
    link_share: dict[str, float]
    jitter: float
    latency_factor: float
    single_step_ms: dict[Series, float]
    residuals: tuple[Residual, ...]

    def setup(self, series: Series, gpus: int, rate_gbps: float | None = None) -> Setup:
        return _setup(series, gpus, self.single_step_ms[series], rate_gbps)


def read_trials(run: Path) -> list[Trial]:
    path = run / "trials.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise UserError(f"--calibrate: {path} does not exist, give a run folder with a trials.jsonl")
    trials = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            trials.append(Trial.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UserError(f"--calibrate: {path} line {number}: {where or 'record'}: {first['msg']}") from error
    return trials


def calibrate(run: Path, fit_nodes: int | None = None, start: Parameters = DEFAULTS) -> Calibration:
    """Fit on all measured points, or on those of at most `fit_nodes` nodes and show the others as held out."""
    # scipy takes half a second to import, which only this path should pay.
    from scipy.optimize import least_squares

    # Reading data takes time that the model's step does not contain.
    trials = [t for t in read_trials(run) if t.status == "ok" and t.step_ms and t.point.data == "synthetic"]
    base = _single_steps(trials, start)
    known = [trial for trial in trials if _series(trial.point) in base]
    used = [trial for trial in known if fit_nodes is None or trial.point.nodes <= fit_nodes]
    if not any(trial.point.nodes > 1 for trial in used):
        raise UserError(f"--calibrate: {run} has no successful trial on two or more nodes to fit the network on")
    fabrics = sorted({trial.point.fabric for trial in used if trial.point.nodes > 1})

    def unpack(vector: Sequence[float]) -> tuple[dict[str, Parameters], dict[str, float], float, float]:
        jitter, latency = start.jitter * math.exp(vector[0]), math.exp(vector[1])
        common = replace(
            start,
            jitter=jitter,
            launch_ms=start.launch_ms * latency,
            ring_hop_ms=start.ring_hop_ms * latency,
            tree_hop_ms=start.tree_hop_ms * latency,
        )
        shares: dict[str, float] = {}
        each: dict[str, Parameters] = {}
        for fabric, moved in zip(fabrics, vector[2:], strict=True):
            rate = max(trial.point.rate_gbps for trial in used if trial.point.fabric == fabric)
            transport = transport_of(fabric)
            ceiling = dict(start.ceiling_gbps)[transport]
            usual = min(dict(start.goodput)[transport] * rate, ceiling)
            shares[fabric] = usual * math.exp(moved) / rate
            each[fabric] = replace(
                common,
                goodput=((transport, shares[fabric]),),
                ceiling_gbps=((transport, max(ceiling, shares[fabric] * rate)),),
                fitted=True,
            )
        return each, shares, jitter, latency

    def misses(vector: Sequence[float]) -> list[float]:
        each, *_ = unpack(vector)
        found = [vector[0] / PRIOR_JITTER, vector[1] / PRIOR_LATENCY, *(moved / PRIOR_LINK for moved in vector[2:])]
        for trial in used:
            found.append(math.log(_fitted_ms(trial, base, each, common=start) / _measured(trial)) / _noise(trial))
        return found

    fit = least_squares(misses, [0.0] * (2 + len(fabrics)), bounds=(-5, 3))
    each, shares, jitter, latency = unpack([float(value) for value in fit.x])
    residuals = tuple(
        Residual(
            _series(trial.point),
            trial.point.nodes,
            trial.point.gpus,
            _measured(trial),
            _fitted_ms(trial, base, each, common=start),
            held_out=trial not in used,
        )
        for trial in known
        if trial.point.nodes == 1 or trial.point.fabric in each
    )
    spread = math.sqrt(sum(math.log1p(r.error) ** 2 for r in residuals if not r.held_out) / len(used))
    # Measured here, so the delay of a GPU is no longer that of clusters at large.
    each = {
        fabric: replace(found, rest=max(start.rest, NORMAL_80 * spread), jitter_doubt=(0.7, 1.0))
        for fabric, found in each.items()
    }
    return Calibration(str(run), each, shares, jitter, latency, base, residuals)


def transport_of(fabric: str) -> str:
    """Trials name their fabric; its name tells the transport."""
    low = fabric.lower()
    return "rdma" if low.startswith("ib") or any(word in low for word in ("infiniband", "rdma", "verbs")) else "tcp"


def _series(point: Point) -> Series:
    return Series(
        point.fabric,
        point.rate_gbps,
        point.gpus_per_node,
        point.batch,
        point.model,
        point.engine,
        point.compression,
        point.device,
    )


def _setup(series: Series, gpus: int, single_step_ms: float, rate_gbps: float | None = None) -> Setup:
    return Setup(
        model=series.model,
        batch=series.batch,
        single_step_ms=single_step_ms,
        gpus=gpus,
        gpus_per_node=series.gpus_per_node,
        rate_gbps=rate_gbps or series.rate_gbps,
        transport=transport_of(series.fabric),
        engine=series.engine.split("-")[0],
        compression=series.compression,
        # Our fabrics are ports, or shaped without credit for idle time.
        link="native",
        gpu=series.device.removeprefix("emulated:") if series.device.startswith("emulated:") else None,
    )


def _single_steps(trials: Sequence[Trial], start: Parameters) -> dict[Series, float]:
    """A step on one GPU, per series: measured, else as the emulated device has it, else from the smallest point."""
    alone: dict[tuple[str, int, str], list[float]] = {}
    for trial in trials:
        if trial.point.gpus == 1:
            alone.setdefault(_device_key(trial.point), []).append(_measured(trial))
    steps: dict[Series, float] = {}
    for trial in sorted(trials, key=lambda trial: trial.point.gpus):
        series = _series(trial.point)
        if series in steps:
            continue
        key = _device_key(trial.point)
        if key in alone:
            steps[series] = median(alone[key])
        elif trial.emulation is not None:
            steps[series] = trial.emulation.compute_ms
        elif trial.point.nodes == 1:
            guess = _measured(trial)
            steps[series] = guess * guess / step_ms(_setup(series, trial.point.gpus, guess), start)
    return steps


def _device_key(point: Point) -> tuple[str, int, str]:
    return point.device, point.batch, point.model


def _measured(trial: Trial) -> float:
    if trial.step_ms is None:
        raise UserError(f"trial {trial.id}: status is ok but step_ms is missing")
    return trial.step_ms.median


def _noise(trial: Trial) -> float:
    """Relative standard deviation of a trial's median, from its 95% interval."""
    if trial.step_ms is None:
        return LEAST_NOISE
    return max(LEAST_NOISE, (trial.step_ms.high - trial.step_ms.low) / 3.92 / trial.step_ms.median)


def _fitted_ms(trial: Trial, base: dict[Series, float], each: dict[str, Parameters], common: Parameters) -> float:
    series = _series(trial.point)
    parameters = each.get(series.fabric, common)
    return step_ms(_setup(series, trial.point.gpus, base[series]), parameters)
