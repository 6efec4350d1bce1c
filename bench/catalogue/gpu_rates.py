"""Duration of a training step on one GPU, from published rates by batch."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources

from bench.catalogue import models
from cluster.core.errors import UserError

# All published rates are for this network. Other networks are scaled from it.
REFERENCE_MODEL = "resnet50"

# Other names for GPUs of the table.
ALIASES = {"1080ti": "gtx1080ti", "h100": "h100-sxm"}

# Default precision: the first of these that was published for the device.
PRECISION_ORDER = ("fp32", "tf32", "amp", "fp16")

# Batch at which the fixed cost of a step (launches, optimiser) equals the cost of its images. Used if only one rate was
# published. The pairs in the table give 3 (K80), 9 (P100) and 17 (V100).
HALF_BATCH = 8.0


@dataclass(frozen=True)
class Rate:
    """One published measurement on one GPU."""

    batch: int
    images_per_second: float
    source: str

    @property
    def step_ms(self) -> float:
        return 1000 * self.batch / self.images_per_second


@dataclass(frozen=True)
class Profile:
    """An accelerator: its published rates by precision, ordered by batch."""

    name: str
    rates: dict[str, tuple[Rate, ...]]

    @property
    def default_precision(self) -> str:
        return next(precision for precision in PRECISION_ORDER if precision in self.rates)


@cache
def published(name: str) -> tuple[dict[str, str], ...]:
    """Rows of a published table."""
    text = resources.files("bench.catalogue").joinpath("published", f"{name}.csv").read_text()
    return tuple(csv.DictReader(text.splitlines()))


def _profiles() -> dict[str, Profile]:
    found: dict[str, dict[str, list[Rate]]] = {}
    for row in published("single-gpu"):
        rate = Rate(int(row["batch"]), float(row["images_per_second"]), row["source"])
        found.setdefault(row["gpu"], {}).setdefault(row["precision"], []).append(rate)
    return {
        gpu: Profile(gpu, {name: tuple(sorted(rates, key=lambda rate: rate.batch)) for name, rates in by.items()})
        for gpu, by in found.items()
    }


PROFILES = _profiles()


def get(name: str) -> Profile:
    found = PROFILES.get(ALIASES.get(name, name))
    if found is None:
        raise UserError(f"gpu: {name!r} is not known, use one of {', '.join((*PROFILES, *ALIASES))}")
    return found


def compute_ms(profile: str, model: str, batch: int, precision: str | None = None) -> tuple[float, str]:
    """Milliseconds of forward plus backward of one step, and the source of the figure.

    The default precision is fp32, if it was published for the GPU.
    """
    if batch < 1:
        raise UserError(f"batch: {batch} must be at least 1")
    device = get(profile)
    network = models.get(model)
    wanted = precision or device.default_precision
    used = _published_precision(device, wanted)
    step, how = _at_batch(device.rates[used], batch)
    source = f"{device.name} {used} {REFERENCE_MODEL}, {how}"
    if used != wanted:
        source += f"; {wanted} was not published, {used} is used instead"
    if network.name != REFERENCE_MODEL:
        factor, by = step_ratio(network.name)
        step *= factor
        source += f"; scaled by {by} to {model} (x{factor:.2f})"
    return step, source


@cache
def step_ratio(model: str) -> tuple[float, str]:
    """Step time of a network relative to the reference, and the source of the ratio.

    A published pair of rates on one GPU comes first. Multiply-accumulates alone make VGG-16 2.7 times too slow, because
    its convolutions are large and regular.
    """
    alone: dict[tuple[str, str], dict[str, float]] = {}
    for row in published("tf-benchmarks"):
        if row["gpus"] == "1" and row["data"] == "synthetic":
            alone.setdefault((row["system"], row["batch"]), {})[row["model"]] = float(row["images_per_second"])
    for (system, batch), rates in alone.items():
        if model in rates and REFERENCE_MODEL in rates:
            return rates[REFERENCE_MODEL] / rates[model], f"the rates of both on {system} at batch {batch} (TensorFlow)"
    return models.get(model).macs / models.get(REFERENCE_MODEL).macs, "multiply-accumulates"


def _published_precision(device: Profile, wanted: str) -> str:
    if wanted in device.rates:
        return wanted
    # Two names for the same arithmetic: automatic mixed precision computes in half precision, and on Ampere and later
    # single-precision convolutions run as TF32 by default.
    stand_in = {"fp32": "tf32", "amp": "fp16", "fp16": "amp"}.get(wanted)
    if stand_in in device.rates:
        return stand_in
    raise UserError(f"precision: {wanted!r} was not published for {device.name}, use one of {', '.join(device.rates)}")


def _at_batch(rates: tuple[Rate, ...], batch: int) -> tuple[float, str]:
    """Step time at a batch: interpolated between published points; a fixed cost below them, the last rate above."""
    for rate in rates:
        if rate.batch == batch:
            return rate.step_ms, f"batch {batch} as published ({rate.source})"
    below = [rate for rate in rates if rate.batch < batch]
    above = [rate for rate in rates if rate.batch > batch]
    if below and above:
        low, high = below[-1], above[0]
        share = (batch - low.batch) / (high.batch - low.batch)
        names = low.source if low.source == high.source else f"{low.source} and {high.source}"
        step = low.step_ms + share * (high.step_ms - low.step_ms)
        return step, f"batch {batch} interpolated between {low.batch} and {high.batch} ({names})"
    if below:
        last = below[-1]
        return last.step_ms * batch / last.batch, f"batch {batch} at the rate of batch {last.batch} ({last.source})"
    first = above[0]
    fixed = HALF_BATCH
    if len(above) > 1:
        second = above[1]
        slope = (second.step_ms - first.step_ms) / (second.batch - first.batch)
        fixed = max(0.0, first.step_ms / slope - first.batch)
    step = first.step_ms * (batch + fixed) / (first.batch + fixed)
    return step, f"batch {batch} extrapolated from {first.batch} ({first.source})"
