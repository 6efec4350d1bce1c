"""The 80% interval of a prediction.

Each uncertainty is varied alone, and the effects are added as independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bench.predict.inputs import FITTED_WIDTHS, WIDTHS, Parameters, Setup
from bench.predict.simulate import Step, simulate

OTHERS = "network or hosts"
# What removes most of each doubt.
MEASURE = {
    "bandwidth between nodes": "images/s on two nodes or more, given as --anchor GPUS:RATE",
    "bandwidth between the GPUs of a node": "images/s on one whole node",
    "bandwidth of CPU buffers": "images/s on two nodes or more, given as --anchor GPUS:RATE",
    "parameter servers": "images/s with these servers, given as --anchor GPUS:RATE",
    "stragglers": "images/s on as many nodes as possible, given as --anchor GPUS:RATE",
    OTHERS: "images/s on as many nodes as possible, given as --anchor GPUS:RATE",
    "more nodes than were measured": "images/s on as many nodes as possible, given as --anchor GPUS:RATE",
    "rate of one GPU": "images/s of one GPU, given as --single-rate",
    "framework and host": "images/s on one whole node",
}


@dataclass(frozen=True)
class Width:
    """Factors on the rate that bound the interval, and what widens it most."""

    low: float
    high: float
    largest: str


def of(setup: Setup, parameters: Parameters, step: Step) -> Width:
    total = step.total
    slower = {"rate of one GPU": setup.compute_doubt, "framework and host": parameters.rest}
    faster = dict(slower)
    if setup.gpus > 1:
        less, more = parameters.jitter_doubt
        slower["stragglers"], faster["stragglers"] = more * step.straggler / total, less * step.straggler / total
        slower["framework and host"] = math.hypot(parameters.rest, host_doubt(setup, parameters))
        changes = [0.0, *(math.log(simulate(setup, other).total / total) for other in parameters.others)]
        slower[OTHERS], faster[OTHERS] = max(changes), -min(changes)
        if parameters.fitted_nodes and setup.nodes > parameters.fitted_nodes:
            beyond = parameters.growth_doubt * math.log2(setup.nodes / parameters.fitted_nodes)
            slower["more nodes than were measured"] = faster["more nodes than were measured"] = beyond
        for name, doubt in doubts(setup, parameters).items():
            slower[name] = math.log(simulate(setup, scaled(parameters, name, 1 / doubt)).total / total)
            faster[name] = -math.log(simulate(setup, scaled(parameters, name, doubt)).total / total)
    largest = max(slower, key=lambda name: slower[name] + max(0.0, faster.get(name, 0.0)))
    wide = parameters.width
    if wide is None:
        wide = (FITTED_WIDTHS if parameters.fitted else WIDTHS)[setup.kind] if setup.gpus > 1 else 1.0
    # The widths were learnt from rows whose rate on one GPU is known, and beside what else explains the anchor.
    alone = slower.pop("rate of one GPU")
    del faster["rate of one GPU"]
    below = math.hypot(alone, slower.pop(OTHERS, 0.0), wide * math.hypot(*slower.values()))
    above = math.hypot(alone, faster.pop(OTHERS, 0.0), wide * math.hypot(*faster.values()))
    # No cluster is faster than its GPUs alone.
    most = total / (setup.single_step_ms * setup.grad_accum) * math.exp(math.hypot(alone, parameters.rest))
    return Width(math.exp(-below), min(math.exp(above), most), largest)


def host_doubt(setup: Setup, parameters: Parameters) -> float:
    """Frameworks and hosts that feed several GPUs lose up to a quarter in published runs with short steps per image."""
    if parameters.fitted:
        return 0.0
    return parameters.host_doubt if min(setup.gpus, setup.gpus_per_node) > 1 else parameters.host_doubt / 2


def doubts(setup: Setup, parameters: Parameters) -> dict[str, float]:
    """Uncertainties of bandwidths, as factors."""
    found: dict[str, float] = {}
    if min(setup.gpus, setup.gpus_per_node) > 1:
        found["bandwidth between the GPUs of a node"] = parameters.intra_doubt
    if setup.collective != "nccl" and setup.engine != "ps":
        found["bandwidth of CPU buffers"] = parameters.cpu_doubt
    if setup.nodes > 1:
        known = parameters.known_doubt if parameters.fitted else parameters.unknown_doubt
        if setup.rate_gbps is None or (setup.link == "cloud" and setup.transport == "tcp"):
            known = parameters.known_doubt if parameters.fitted else parameters.no_rate_doubt
        elif setup.transport == "tcp" and not parameters.fitted:
            known = parameters.known_doubt if setup.rate_gbps <= 10 else parameters.tcp_doubt
        found["bandwidth between nodes"] = known
        if setup.engine == "ps":
            found["parameter servers"] = parameters.known_doubt if parameters.fitted else parameters.server_doubt
    return found


def scaled(parameters: Parameters, name: str, factor: float) -> Parameters:
    if name == "bandwidth between the GPUs of a node":
        local = parameters.local_launch_ms / factor
        return replace(parameters, intra=parameters.intra * factor, local_launch_ms=local)
    if name == "bandwidth of CPU buffers":
        return replace(parameters, cpu_gbytes=parameters.cpu_gbytes * factor)
    if name == "parameter servers":
        even, grpc = parameters.server_gbytes * factor, parameters.grpc_gbytes * factor
        return replace(parameters, server_gbytes=even, grpc_gbytes=grpc, ps_local=parameters.ps_local / factor)
    return replace(
        parameters,
        link_factor=parameters.link_factor * factor,
        ceiling_gbps=tuple((via, value * factor) for via, value in parameters.ceiling_gbps),
        ring_hop_ms=parameters.ring_hop_ms / factor,
        tree_hop_ms=parameters.tree_hop_ms / factor,
        launch_ms=parameters.launch_ms / factor,
    )
