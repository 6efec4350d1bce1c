"""How fast bytes move: inside a node, out of it, and around the ring of a collective."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.catalogue import gpu_rates, interconnect
from bench.predict.inputs import USUAL_GBPS, Parameters, Setup

# How sharply TCP bends below a port's rate, and the port from which on it grows.
TCP_CURVE, TCP_GROWS_GBPS = 4, 40.0


@dataclass(frozen=True)
class Path:
    """A part of the way of a gradient, by the name of what limits it."""

    limit: str
    gbytes: float


@dataclass(frozen=True)
class Collective:
    """Milliseconds per all-reduce and per byte, and what limits the bytes."""

    per_call: float
    per_byte: float
    limit: str


def usual_gbps(parameters: Parameters, transport: str, port_gbps: float, nics: int = 1) -> float:
    """What all ports of a node reach over this transport, Gbit/s.

    A few TCP streams reach less of a faster port. The curve has no corner: a faster port never gives less.
    """
    # Eight ports of 100 Gbit/s were seen to reach 600.
    rate: float = dict(parameters.goodput)[transport] * port_gbps * nics ** (1 - parameters.rail_loss)
    if transport == "tcp":
        knee = parameters.tcp_knee_gbps * nics * max(1.0, port_gbps / TCP_GROWS_GBPS) ** parameters.tcp_growth
        rate /= (1 + (rate / knee) ** TCP_CURVE) ** (1 / TCP_CURVE)
    return rate


def link_gbps(setup: Setup, parameters: Parameters) -> float:
    """Goodput of one node, Gbit/s: what the transport usually reaches, corrected by what was measured."""
    if setup.rate_gbps is None:
        rate = dict(parameters.prior_gbps)[setup.transport]
        if setup.transport != "tcp":
            known = gpu_rates.canonical(setup.gpu or "")
            rate = next((gbps for name, gbps in USUAL_GBPS.items() if known.startswith(name)), rate)
    else:
        rate = usual_gbps(parameters, setup.transport, setup.port_gbps, setup.nics)
        if setup.link == "cloud" and setup.transport == "tcp":
            rate = min(rate, dict(parameters.prior_gbps)["tcp"])
    # No link exceeds its rate, however uncertain it is.
    ports = setup.port_gbps * setup.nics
    return min(rate * parameters.link_factor, dict(parameters.ceiling_gbps)[setup.transport], ports)


def inside(setup: Setup, parameters: Parameters) -> Path:
    """The link between the GPUs of a node."""
    return Path(interconnect.NAMES[setup.intra], setup.intra_gbytes * parameters.intra)


def outside(setup: Setup, parameters: Parameters) -> Path:
    """The way out of a node."""
    gbps = link_gbps(setup, parameters)
    full = dict(parameters.goodput)[setup.transport] * (setup.port_gbps if setup.rate_gbps else math.inf)
    tcp = setup.transport == "tcp" and gbps < 0.9 * full * setup.nics ** (1 - parameters.rail_loss)
    return Path("TCP" if tcp else "NIC", gbps / 8)


def collective(setup: Setup, parameters: Parameters) -> Collective:
    n, nodes, g = setup.gpus, setup.nodes, min(setup.gpus, setup.gpus_per_node)
    within = inside(setup, parameters)
    if setup.collective != "nccl":
        # The sums are calculated on the CPU, and every byte crosses its memory several times.
        within = min(within, Path("CPU buffers", parameters.cpu_gbytes), key=lambda path: path.gbytes)
    if nodes == 1:
        return Collective(parameters.local_launch_ms, 2 * (n - 1) / n / (within.gbytes * 1e6), within.limit)
    between = outside(setup, parameters)
    if setup.collective != "nccl":
        between = min(between, Path("CPU buffers", parameters.cpu_gbytes), key=lambda path: path.gbytes)
    spread = 1 + parameters.node_loss * math.log2(nodes / 2)
    if setup.hierarchical:
        ranks = nodes
        parts = {
            within.limit: 2 * (g - 1) / g / (within.gbytes * 1e6),
            between.limit: 2 * (nodes - 1) / nodes / (between.gbytes * 1e6) * spread,
        }
        per_byte, limit = sum(parts.values()), max(parts, key=lambda name: parts[name])
    else:
        slowest = between if g == 1 else min(within, between, key=lambda path: path.gbytes)
        ranks, per_byte, limit = n, 2 * (n - 1) / n / (slowest.gbytes * 1e6) * spread, slowest.limit
    ring = 2 * (ranks - 1) * parameters.ring_hop_ms
    tree = 2 * math.log2(ranks) * parameters.tree_hop_ms
    return Collective(parameters.launch_ms + min(ring, tree), per_byte, limit)
