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
# Where they are looked for.
DELAYS, STEP, STEPS = (-4.0, 3.0), 0.3, 16
# How much worse an explanation may be that is still likely: 95% of chi-squared with two parameters.
LIKELY = 5.991


def anchor(observations: Sequence[Observation], parameters: Parameters = DEFAULTS) -> Parameters:
    """Fit the bandwidth between nodes and the delay of a GPU, each near its default as far as the rows allow.

    A slow run has a slow network or slow hosts. What was less certain before takes more of the difference.
    """
    if all(one.setup.nodes == 1 for one in observations):
        raise UserError("anchor: a bandwidth needs a measurement on more than one node")
    setup = observations[0].setup
    sure = setup.rate_gbps is not None and (
        setup.transport != "tcp" or (setup.rate_gbps <= 25 and setup.link != "cloud")
    )
    spread = KNOWN_LINK if sure and setup.collective == "nccl" and setup.engine != "ps" else UNKNOWN_LINK

    def with_both(link: float, delay: float) -> Parameters:
        return _with_link(observations, replace(parameters, jitter=parameters.jitter * math.exp(delay)), link)

    def miss(link: float, delay: float) -> float:
        tried = with_both(link, delay)
        errors = (math.log(step_ms(one.setup, tried) / one.step_ms) / NOISE for one in observations)
        return sum(error**2 for error in errors) + (link / spread) ** 2 + (delay / HOST) ** 2

    highest = _highest(observations, parameters)

    def best_delay(link: float) -> float:
        return _golden(lambda delay: miss(link, delay), *DELAYS, 1e-3)

    # Link and delay explain the same row, so each link is tried with the delay that fits it.
    delays = {link: best_delay(link) for link in (highest - STEP * number for number in range(STEPS))}
    misses = {link: miss(link, delay) for link, delay in delays.items()}
    near = min(misses, key=lambda link: misses[link])
    link = _golden(lambda value: miss(value, best_delay(value)), near - STEP, min(near + STEP, highest), 0.02)
    delay = best_delay(link)
    # The slowest and the fastest network that explain the row about as well, each with its own hosts.
    likely = [value for value in sorted(misses) if misses[value] < miss(link, delay) + LIKELY]
    others = tuple(with_both(value, delays[value]) for value in (likely[:1] + likely[-1:]))
    most = max(one.setup.nodes for one in observations)
    return replace(with_both(link, delay), jitter_doubt=(0.3, 0.4), others=others, fitted_nodes=most)


def _golden(function: Callable[[float], float], low: float, high: float, close: float = 1e-4) -> float:
    """Golden-section search. Where the function is flat (all communication hidden), the highest value wins."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    while high - low > close:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return (low + high) / 2
