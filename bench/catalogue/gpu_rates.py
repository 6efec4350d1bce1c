"""Duration of a training step on one GPU, from published rates by batch."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from bench.catalogue import models
from cluster.core.errors import UserError

# CNNs without a published rate of their own are scaled from this network.
REFERENCE_MODEL = "resnet50"

# Other names for GPUs of the table.
ALIASES = {"1080ti": "gtx1080ti", "h100": "h100-sxm"}
# Forms in which one of them was sold, such as v100-sxm2-16gb. Their rates are close; link and memory differ.
FORM = re.compile(r"(?P<gpu>[a-z0-9]+)(?:-(?P<link>pcie|sxm\d?))?(?:-(?P<gb>\d+)gb)?")

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
    """An accelerator: its published rates of one network by precision, ordered by batch."""

    name: str
    rates: dict[str, tuple[Rate, ...]]
    source_model: str = REFERENCE_MODEL

    @property
    def default_precision(self) -> str:
        return next(precision for precision in PRECISION_ORDER if precision in self.rates)


@cache
def published(name: str) -> tuple[dict[str, str], ...]:
    """Rows of a published table."""
    text = resources.files("bench.catalogue").joinpath("published", f"{name}.csv").read_text()
    return tuple(csv.DictReader(text.splitlines()))


# GPU, network and length of a sequence (0: images).
_Key = tuple[str, str, int]


def _profiles() -> dict[_Key, Profile]:
    found: dict[_Key, dict[str, list[Rate]]] = {}
    for row in published("single-gpu"):
        rate = Rate(int(row["batch"]), float(row["images_per_second"]), row["source"])
        key = row["gpu"], row["model"], int(row["seq_len"] or 0)
        found.setdefault(key, {}).setdefault(row["precision"], []).append(rate)
    return {
        key: Profile(
            key[0], {name: tuple(sorted(rates, key=lambda rate: rate.batch)) for name, rates in by.items()}, key[1]
        )
        for key, by in found.items()
    }


_BY_NETWORK = _profiles()
PROFILES = {gpu: profile for (gpu, model, _), profile in _BY_NETWORK.items() if model == REFERENCE_MODEL}


def canonical(name: str) -> str:
    """The name in the tables: lower case, without an alias and without the form."""
    asked = ALIASES.get(name.lower(), name.lower())
    if asked in PROFILES or not (found := FORM.fullmatch(asked)):
        return asked
    base = ALIASES.get(found["gpu"], found["gpu"])
    # The PCIe form of the H100 is another chip.
    return asked if base.endswith("-sxm") and found["link"] == "pcie" else base if base in PROFILES else asked


def form(name: str | None) -> dict[str, str]:
    """What the name says about the form: link (pcie, sxm2) and gb."""
    found = FORM.fullmatch((name or "").lower())
    return {key: value for key, value in found.groupdict().items() if value} if found else {}


def get(name: str) -> Profile:
    found = PROFILES.get(canonical(name))
    if found is None:
        raise UserError(f"gpu: {name!r} is not known, use one of {', '.join((*PROFILES, *ALIASES))}")
    return found


def own_rates(gpu: str, network: models.Model) -> Profile | None:
    """Published rates of this very network on this GPU."""
    return _BY_NETWORK.get((canonical(gpu), network.name, network.tokens))


def with_rates(network: models.Model) -> list[str]:
    """GPUs on which a step of this network has a known duration."""
    return [gpu for gpu in PROFILES if network.follows_macs or own_rates(gpu, network) is not None]


def usual_precision(gpu: str, model: str, seq_len: int | None = None) -> str:
    return (own_rates(gpu, models.get(model, seq_len)) or get(gpu)).default_precision


def compute_ms(
    profile: str, model: str, batch: int, precision: str | None = None, seq_len: int | None = None
) -> tuple[float, str]:
    """Milliseconds of forward plus backward of one step, and the source of the figure.

    The default precision is fp32, if it was published for the GPU.
    """
    if batch < 1:
        raise UserError(f"batch: {batch} must be at least 1")
    device = get(profile)
    network = models.get(model, seq_len)
    own = own_rates(profile, network)
    if own is None and not network.follows_macs:
        what = f"{model} at sequence length {network.tokens}" if network.tokens else model
        raise UserError(f"gpu: no rate of {what} is published for {device.name}; measure one GPU, give --single-rate")
    device = own or device
    wanted = precision or device.default_precision
    used = _published_precision(device, wanted)
    step, how = _at_batch(device.rates[used], batch)
    length = f" (sequence length {network.tokens})" if network.tokens else ""
    source = f"{device.name} {used} {device.source_model}{length}, {how}"
    if used != wanted:
        source += f"; {wanted} was not published, {used} is used instead"
    if network.name != device.source_model:
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
