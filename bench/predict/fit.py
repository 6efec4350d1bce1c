"""Fit the bandwidth that a cluster's transport reaches, from one measurement or more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.predict.inputs import DEFAULTS, Parameters, Setup
from bench.predict.network import link_gbps
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


# Smallest bandwidth of the search, Gbit/s, and the largest where no rate is stated.
LEAST_GBPS, MOST_GBPS = 0.01, 400.0


def fit_link(observations: Sequence[Observation], parameters: Parameters = DEFAULTS) -> Parameters:
    """The factor on the bandwidth between nodes with the smallest relative error of the predicted step times.

    No link exceeds its rate. Parameter servers and CPU buffers share the factor: they are a part of the way.
    """
    several = [one.setup for one in observations if one.setup.nodes > 1]
    if not several:
        raise UserError("anchor: a bandwidth needs a measurement on more than one node")
    usual = max(link_gbps(setup, parameters) for setup in several)

    def candidate(log_factor: float) -> Parameters:
        return _with_link(observations, parameters, log_factor)

    def miss(log_factor: float) -> float:
        tried = candidate(log_factor)
        return sum(math.log(step_ms(one.setup, tried) / one.step_ms) ** 2 for one in observations)

    return candidate(_golden(miss, math.log(LEAST_GBPS / usual), _highest(observations, parameters)))


def _highest(observations: Sequence[Observation], parameters: Parameters) -> float:
    """Logarithm of the largest factor: no link exceeds its rate."""
    several = [one.setup for one in observations if one.setup.nodes > 1]
    most = [setup.rate_gbps * setup.nics if setup.rate_gbps else MOST_GBPS for setup in several]
    usual = [link_gbps(setup, parameters) for setup in several]
    return max(0.0, *(math.log(cap / link) for cap, link in zip(most, usual, strict=True)))


def _with_link(observations: Sequence[Observation], parameters: Parameters, log_factor: float) -> Parameters:
    factor, setups = math.exp(log_factor), [one.setup for one in observations]
    fitted = replace(parameters, link_factor=parameters.link_factor * factor, fitted=True)
    if any(setup.engine == "ps" for setup in setups):
        local, even = parameters.ps_local / factor, parameters.server_gbytes * factor
        fitted = replace(fitted, server_gbytes=even, grpc_gbytes=parameters.grpc_gbytes * factor, ps_local=local)
    if any(setup.collective != "nccl" for setup in setups):
        fitted = replace(fitted, cpu_gbytes=parameters.cpu_gbytes * factor)
    return fitted


# How much a measurement is believed, and standard deviations of the priors, in natural logarithms.
NOISE, KNOWN_LINK, UNKNOWN_LINK, HOST = 0.005, 0.25, 0.9, 0.9
ROUNDS = 4


def anchor(observations: Sequence[Observation], parameters: Parameters = DEFAULTS) -> Parameters:
    """Fit the bandwidth between nodes and the delay of a GPU, each near its default as far as the rows allow.

    A slow run has a slow network or slow hosts. What was less certain before takes more of the difference.
    """
    first = fit_link(observations, parameters)
    setup = observations[0].setup
    sure = setup.rate_gbps is not None and (setup.transport != "tcp" or setup.rate_gbps <= 25)
    spread = KNOWN_LINK if sure and setup.collective == "nccl" and setup.engine != "ps" else UNKNOWN_LINK
    most = math.log(first.link_factor / parameters.link_factor)

    def with_both(link: float, delay: float) -> Parameters:
        return _with_link(observations, replace(parameters, jitter=parameters.jitter * math.exp(delay)), link)

    def miss(link: float, delay: float) -> float:
        tried = with_both(link, delay)
        errors = (math.log(step_ms(one.setup, tried) / one.step_ms) / NOISE for one in observations)
        return sum(error**2 for error in errors) + (link / spread) ** 2 + (delay / HOST) ** 2

    link, delay = min(max(most, -4.0), 2.0), 0.0
    highest = _highest(observations, parameters)
    for _ in range(ROUNDS):
        delay = _golden(lambda value, link=link: miss(link, value), -4.0, 3.0)  # type: ignore[misc]
        link = _golden(lambda value, delay=delay: miss(value, delay), -5.0, highest)  # type: ignore[misc]
    # One row leaves most of what was unknown about delays.
    return replace(with_both(link, delay), jitter_doubt=(0.7, 1.0))


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
