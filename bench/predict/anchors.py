"""--anchor GPUS:RATE[@GBPS]: correct the model by one of the user's own measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bench.parse import counts, number, numbers
from bench.predict.fit import Observation, anchor
from bench.predict.inputs import DEFAULTS, Parameters, Setup
from cluster.core.errors import UserError

# A measurement may exceed the ideal by this much before it must be a mistake.
NOISE = 1.02
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Anchor:
    """A measurement belongs to one network. What it says about the bandwidth carries over to others as a share."""

    gpus: int
    images_per_second: float
    rate_gbps: float | None


def parse_rates(text: str | None) -> list[float | None]:
    """A list of Gbit/s; `unknown` stands for a network whose rate nobody states."""
    if text is None:
        return [None]
    if text.strip() == UNKNOWN:
        return [None]
    return [number(word, "--rate-gbps") for word in text.split(",")]


def parse(text: str, rates: Sequence[float | None]) -> Anchor:
    measured, at, rate = text.partition("@")
    gpus, colon, images = measured.partition(":")
    if not colon:
        raise UserError(f"--anchor: {text!r} is not GPUS:RATE, write for example 8:1282.3 or 8:1282.3@10")
    if not at and len(set(rates)) > 1:
        first = next(rate for rate in rates if rate)
        raise UserError(f"--anchor: say on which network it was measured, for example {text}@{first:g} (Gbit/s)")
    known = number(rate, "--anchor") if at else rates[0]
    return Anchor(counts(gpus, "--anchor")[0], numbers(images, "--anchor")[0], known)


def parameters(found: Anchor, setup: Setup, start: Parameters = DEFAULTS) -> Parameters:
    measured = replace(setup, gpus=found.gpus, rate_gbps=found.rate_gbps, rate_unknown=found.rate_gbps is None)
    if measured.nodes < 2:
        raise UserError(f"--anchor: {found.gpus} GPUs are one node; give a measurement on two nodes or more")
    ideal = found.gpus * setup.single_images_per_second
    if found.images_per_second > NOISE * ideal:
        raise UserError(
            f"--anchor: {found.images_per_second:g} images/s are more than {found.gpus} GPUs can do without a network, "
            f"{ideal:.0f}; correct the measurement, or give --single-rate"
        )
    return _fitted(measured, min(found.images_per_second, 0.999 * ideal), start)


@lru_cache(maxsize=64)
def _fitted(setup: Setup, images_per_second: float, start: Parameters) -> Parameters:
    return anchor([Observation.of_rate(setup, images_per_second)], start)
