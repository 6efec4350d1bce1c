"""Fit the model to a measured run, so that a few nodes predict many.

Four quantities are fitted per engine, relative to their defaults: the share of its rate that each fabric reaches, the
mean delay of a GPU, the latency of a collective, and the bandwidth lost per doubling of the nodes. A loose prior keeps
each near its default, so a run of three points changes only what it determines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.predict import device
from bench.predict.device import Device
from bench.predict.inputs import DEFAULTS, Parameters, Setup
from bench.predict.network import usual_gbps
from bench.predict.step import step_ms
from bench.results import runs
from bench.results.trial import Point, Trial
from cluster.core.errors import UserError

# Standard deviations of the priors, in natural logarithms, and the minimum uncertainty of a measurement.
PRIOR_LINK, PRIOR_JITTER, PRIOR_LATENCY, PRIOR_NODES = 0.5, 0.7, 0.7, 1.0
LEAST_NOISE = 0.01
NORMAL_80 = 1.2816


class Link(NamedTuple):
    """A fabric with its transport. Each has its own share of the rate."""

    fabric: str
    transport: str

    def __str__(self) -> str:
        return self.fabric if self.transport == "tcp" else f"{self.fabric} ({self.transport})"


@dataclass(frozen=True)
class Series:
    """The conditions that are constant along one curve of a run."""

    fabric: str
    transport: str
    rate_gbps: float
    gpus_per_node: int
    batch: int
    model: str
    engine: str
    compression: str
    device: str
    # What the trials record of the GPUs and the link between them.
    gpu: str | None = None
    interconnect: str = "auto"
    precision: str | None = None
    period: int = 1

    @property
    def link(self) -> Link:
        return Link(self.fabric, self.transport)


@dataclass(frozen=True)
class Measured:
    """A trial and the curve that it belongs to."""

    trial: Trial
    series: Series

    @property
    def step_ms(self) -> float:
        if self.trial.step_ms is None:
            raise UserError(f"trial {self.trial.id}: status is ok but step_ms is missing")
        return self.trial.step_ms.median


@dataclass(frozen=True)
class Residual:
    """A measured point against the fitted model."""

    series: Series
    nodes: int
    gpus: int
    measured_ms: float
    fitted_ms: float
    # Why the point was not fitted; empty if it was.
    left_out: str

    @property
    def error(self) -> float:
        """Error of the predicted rate; positive is optimistic."""
        return self.measured_ms / self.fitted_ms - 1


@dataclass(frozen=True)
class Fit:
    """The fit of one engine: parameters common to all links, and the share of its rate that each link reaches."""

    common: Parameters
    link_share: dict[Link, float]
    rate_gbps: dict[Link, float]
    latency_factor: float

    def parameters(self, link: Link) -> Parameters:
        """What was measured over what is usual holds at other rates too."""
        if link not in self.link_share:
            return self.common
        rate = self.rate_gbps[link]
        usual = usual_gbps(self.common, link.transport, rate) / rate
        return replace(self.common, link_factor=self.link_share[link] / usual)


@dataclass(frozen=True)
class Calibration:
    run: str
    fits: dict[str, Fit]
    single_step_ms: dict[Series, float]
    residuals: tuple[Residual, ...]
    problems: tuple[str, ...] = ()

    def fitted(self, series: Series) -> bool:
        return series.engine in self.fits and series.link in self.fits[series.engine].link_share

    def parameters(self, series: Series) -> Parameters:
        return self.fits[series.engine].parameters(series.link)

    def setup(self, series: Series, gpus: int, rate_gbps: float | None = None) -> Setup:
        return _setup(series, gpus, self.single_step_ms[series], rate_gbps)


def calibrate(
    run: Path,
    fit_nodes: int | None = None,
    start: Parameters = DEFAULTS,
    show: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Fit on all measured points, or on those of at most `fit_nodes` nodes, and hold out the others."""
    show(f"reading {run}")
    # The model of a step does not include reading data.
    loaded = runs.load(run, field="--calibrate")
    trials = [t for t in loaded.trials if t.status == "ok" and t.step_ms and t.point.data == "synthetic"]
    every = [Measured(trial, _series(trial, loaded.gpu)) for trial in trials]
    base = _single_steps(every, start)
    known = [one for one in every if one.series in base]
    fits: dict[str, Fit] = {}
    for engine in dict.fromkeys(one.series.engine for one in known):
        used = [one for one in known if one.series.engine == engine and not _left_out(one.trial, fit_nodes)]
        if any(one.trial.point.nodes > 1 for one in used):
            fits[engine] = _fit(used, base, start, show)
    if not fits:
        why = "; ".join(["no successful trial on two or more nodes to fit the network on", *loaded.problems])
        raise UserError(f"--calibrate: {run}: {why}")
    residuals = []
    for one in known:
        point, series, fit = one.trial.point, one.series, fits.get(one.series.engine)
        if fit and (point.nodes == 1 or series.link in fit.link_share):
            fitted, left_out = _fitted_ms(one, base, fit), _left_out(one.trial, fit_nodes)
            residuals.append(Residual(series, point.nodes, point.gpus, one.step_ms, fitted, left_out))
    return Calibration(str(run), fits, base, tuple(residuals), tuple(loaded.problems))


def _fit(used: Sequence[Measured], base: dict[Series, float], start: Parameters, show: Callable[[str], None]) -> Fit:
    # scipy takes half a second to import, which only this path should pay.
    from scipy.optimize import least_squares

    links = sorted({one.series.link for one in used if one.trial.point.nodes > 1})
    rates = {one.series.link: one.series.rate_gbps for one in used}
    # The share of its rate that a link usually reaches.
    usual = {link: usual_gbps(start, link.transport, rates[link]) / rates[link] for link in links}

    def unpack(vector: Sequence[float]) -> Fit:
        jitter, latency, nodes, *moved = (math.exp(value) for value in vector)
        common = replace(
            start,
            jitter=start.jitter * jitter,
            launch_ms=start.launch_ms * latency,
            ring_hop_ms=start.ring_hop_ms * latency,
            tree_hop_ms=start.tree_hop_ms * latency,
            node_loss=start.node_loss * nodes,
            fitted=True,
        )
        shares = {link: usual[link] * factor for link, factor in zip(links, moved, strict=True)}
        return Fit(common, shares, rates, latency)

    def errors(fit: Fit) -> list[float]:
        return [math.log(_fitted_ms(one, base, fit) / one.step_ms) for one in used]

    tries = count(1)

    def misses(vector: Sequence[float]) -> list[float]:
        show(f"{used[0].series.engine}: try {next(tries)} of the fit to {len(used)} trials")
        priors = [PRIOR_JITTER, PRIOR_LATENCY, PRIOR_NODES, *(PRIOR_LINK for _ in links)]
        found = [value / prior for value, prior in zip(vector, priors, strict=True)]
        return found + [error / _noise(one.trial) for error, one in zip(errors(unpack(vector)), used, strict=True)]

    # No link exceeds its rate.
    upper = [3.0, 3.0, 3.0, *(1e-6 - math.log(usual[link]) for link in links)]
    best = least_squares(misses, [0.0] * len(upper), bounds=([-5.0] * len(upper), upper))
    fit = unpack([float(value) for value in best.x])
    spread = math.sqrt(sum(error**2 for error in errors(fit)) / len(used))
    # The delay of a GPU was measured here, so it is less uncertain than by default.
    most = max(one.trial.point.nodes for one in used)
    rest = max(start.rest, NORMAL_80 * spread)
    narrower = replace(fit.common, rest=rest, jitter_doubt=(0.7, 1.0), fitted_nodes=most)
    return replace(fit, common=narrower)


def _left_out(trial: Trial, fit_nodes: int | None) -> str:
    if fit_nodes is not None and trial.point.nodes > fit_nodes:
        return "held out"
    return "straggler" if trial.stragglers else ""


def _series(trial: Trial, gpu: str = "") -> Series:
    names = {field.name for field in fields(Series)} - {"period", *Device.__annotations__}
    same = {name: getattr(trial.point, name) for name in names}
    return Series(**same, **device.of(trial, gpu), period=trial.weights.period if trial.weights else 1)


def _setup(series: Series, gpus: int, single_step_ms: float, rate_gbps: float | None = None) -> Setup:
    names = ("model", "batch", "gpus_per_node", "transport", "compression", *Device.__annotations__)
    same = {name: getattr(series, name) for name in names}
    return Setup(
        **same,
        single_step_ms=single_step_ms,
        gpus=gpus,
        rate_gbps=rate_gbps or series.rate_gbps,
        engine="horovod" if series.engine.startswith("horovod") else series.engine,
        # Our parameter servers are the workers.
        placement="nodes" if series.engine == "ps" else "even",
        period=series.period,
        # Our fabrics are ports, or shaped without credit for idle time.
        link="native",
    )


def _single_steps(every: Sequence[Measured], start: Parameters) -> dict[Series, float]:
    """Step time of one GPU per series: measured, or of the emulated device, or derived from the smallest point."""
    alone: dict[tuple[str, int, str], list[float]] = {}
    for one in every:
        if one.trial.point.gpus == 1:
            alone.setdefault(_device_key(one.trial.point), []).append(one.step_ms)
    steps: dict[Series, float] = {}
    for one in sorted(every, key=lambda one: one.trial.point.gpus):
        trial, series = one.trial, one.series
        if series in steps:
            continue
        key = _device_key(trial.point)
        if key in alone:
            steps[series] = median(alone[key])
        elif trial.emulation is not None:
            steps[series] = trial.emulation.compute_ms
        elif trial.point.nodes == 1:
            guess = one.step_ms
            steps[series] = guess * guess / step_ms(_setup(series, trial.point.gpus, guess), start)
    return steps


def _device_key(point: Point) -> tuple[str, int, str]:
    return point.device, point.batch, point.model


def _noise(trial: Trial) -> float:
    """Relative standard deviation of a trial's median, from its 95% interval."""
    if trial.step_ms is None:
        return LEAST_NOISE
    return max(LEAST_NOISE, (trial.step_ms.high - trial.step_ms.low) / 3.92 / trial.step_ms.median)


def _fitted_ms(one: Measured, base: dict[Series, float], fit: Fit) -> float:
    series = one.series
    return step_ms(_setup(series, one.trial.point.gpus, base[series]), fit.parameters(series.link))
