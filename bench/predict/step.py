"""Throughput, efficiency and interval of a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from bench.predict import interval
from bench.predict.inputs import DEFAULTS, Parameters, Setup
from bench.predict.simulate import Step, simulate


@dataclass(frozen=True)
class Prediction:
    """A step's time and where it goes: step = compute + straggler + exposed communication + input wait."""

    images_per_second: float
    efficiency: float
    # Against one node with the same GPUs, as reports count it.
    node_efficiency: float
    step_ms: float
    compute_ms: float
    straggler_ms: float
    exposed_comm_ms: float
    input_wait_ms: float
    comm_ms: float
    bus_gbps: float | None
    low: float
    high: float
    bottleneck: str
    # What widens the interval most, and the measurement that would remove it.
    largest_doubt: str
    measure: str


def predict(setup: Setup, parameters: Parameters = DEFAULTS) -> Prediction:
    step = simulate(setup, parameters)
    width = interval.of(setup, parameters, step)
    rate = 1000 * setup.images_per_step / step.total
    one_node = step if setup.nodes == 1 else simulate(setup.on_one_node(), parameters)
    return Prediction(
        images_per_second=rate,
        efficiency=min(1.0, setup.single_step_ms * setup.grad_accum / step.total),
        node_efficiency=min(1.0, one_node.total / step.total),
        step_ms=step.total,
        compute_ms=step.compute,
        straggler_ms=step.straggler,
        exposed_comm_ms=step.exposed,
        input_wait_ms=step.wait,
        comm_ms=step.comm,
        bus_gbps=step.bus_gbps,
        low=rate * width.low,
        high=rate * width.high,
        bottleneck=bottleneck(step),
        largest_doubt=width.largest,
        measure=interval.MEASURE[width.largest],
    )


def step_ms(setup: Setup, parameters: Parameters = DEFAULTS) -> float:
    """The step time alone, for fits that evaluate it many times."""
    return simulate(setup, parameters).total


def bottleneck(step: Step) -> str:
    """What to change first: the largest loss, or compute when all of them together cost less than a tenth."""
    losses = {"network": step.exposed, "input": step.wait, "stragglers": step.straggler}
    worst = max(losses, key=lambda name: losses[name])
    if sum(losses.values()) < 0.1 * step.total:
        return "compute"
    return step.limit if worst == "network" else worst
