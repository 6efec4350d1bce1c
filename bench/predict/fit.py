"""Fit the bandwidth that a cluster's transport reaches, from one measurement or more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.predict.inputs import DEFAULTS, Parameters, Setup
from bench.predict.step import step_ms
from cluster.core.errors import UserError


@dataclass(frozen=True)
class Observation:
    """A measured step time of a configuration."""

    setup: Setup
    step_ms: float

    @classmethod
    def of_rate(cls, setup: Setup, images_per_second: float) -> Observation:
        return cls(setup, 1000 * setup.images_per_step / images_per_second)


# Lower bound of the search, Gbit/s.
LEAST_GBPS = 0.01


def fit_ceiling(observations: Sequence[Observation], parameters: Parameters = DEFAULTS) -> Parameters:
    """The bandwidth ceiling with the smallest relative error of the predicted step times."""
    if not observations:
        raise UserError("anchor: no measured row to fit a bandwidth ceiling on")
    transport = observations[0].setup.transport
    rates = [one.setup.rate_gbps for one in observations if one.setup.rate_gbps]
    if not rates:
        raise UserError("anchor: a bandwidth ceiling needs a measurement on more than one node")

    def miss(log_gbps: float) -> float:
        candidate = parameters.with_ceiling(transport, math.exp(log_gbps))
        return sum(math.log(step_ms(one.setup, candidate) / one.step_ms) ** 2 for one in observations)

    return parameters.with_ceiling(transport, math.exp(_golden(miss, math.log(LEAST_GBPS), math.log(max(rates)))))


def _golden(function: Callable[[float], float], low: float, high: float) -> float:
    """Golden-section search. Where the function is flat (all communication hidden), the highest value wins."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > 1e-4:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return (low + high) / 2
