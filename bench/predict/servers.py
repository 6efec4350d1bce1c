"""Parameter servers: workers push gradients and pull parameters.

The GPUs of a node add up their gradients first. Placed evenly, every server holds an equal share (BytePS). By tensors,
a server holds whole tensors (TensorFlow): the one with the largest load serves all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bench.predict.inputs import Parameters, Setup
from bench.predict.network import inside, outside


@dataclass(frozen=True)
class Traffic:
    """Milliseconds per byte of the model in one direction, over the network and inside a node, and what limits it.

    `wire_share` is the traffic of the busiest port per step and direction, in units of the model's bytes.
    """

    remote: float
    local: float
    wire_share: float
    limit: str


def traffic(setup: Setup, parameters: Parameters, sizes: tuple[float, ...]) -> Traffic:
    nodes, g = setup.nodes, min(setup.gpus, setup.gpus_per_node)
    within = inside(setup, parameters)
    local = parameters.ps_local / 2 / (within.gbytes * 1e6) if g > 1 else 0.0
    if nodes == 1:
        return Traffic(0.0, local, 0.0, within.limit)
    servers = setup.servers or nodes
    link = outside(setup, parameters)
    spread = 1 + parameters.node_loss * math.log2(nodes / 2)
    if setup.placement == "even":
        # A node reaches its own server through the network stack too: BytePS is as slow on two nodes as on eight.
        share = max(1.0, nodes / servers)
        speed = min(link.gbytes, parameters.server_gbytes)
        limit = "servers" if speed < link.gbytes or servers < nodes else link.limit
        # Both push and pull use both directions of a node that also serves.
        return Traffic(share / (speed * 1e6) * spread, local, 2 * share, limit)
    load = largest_load(sizes, servers) / sum(sizes)
    ways = {"servers": max(load * nodes / link.gbytes, load / parameters.grpc_gbytes), link.limit: 1 / link.gbytes}
    limit = max(ways, key=lambda name: ways[name])
    return Traffic(ways[limit] * spread / 1e6, 0.0, max(load * nodes, 1.0), limit)


@lru_cache(maxsize=256)
def largest_load(sizes: tuple[float, ...], servers: int) -> float:
    """Bytes on the fullest server when each tensor goes to the one with the least."""
    if servers >= len(sizes):
        return max(sizes)
    loads = [0.0] * servers
    for size in reversed(sizes):
        lightest = min(range(servers), key=loads.__getitem__)
        loads[lightest] += size
    return max(loads)


def finish(
    setup: Setup, parameters: Parameters, times: Sequence[float], sizes: Sequence[float], forward: float
) -> tuple[float, Traffic]:
    """Time of the last pull. A node pushes during backward, unless nothing overlaps, and pulls in the next forward."""
    found = traffic(setup, parameters, tuple(sizes))
    payload = sum(sizes)
    if setup.overlap == "none":
        moved = payload * (parameters.ps_turns * found.remote + 2 * found.local)
        return times[-1] + parameters.launch_ms + moved, found
    pushed = max(_drained(times, sizes, found.remote), _drained(times, sizes, found.local))
    pull = max(0.0, payload * max(found.remote, found.local) - forward)
    return pushed + parameters.launch_ms + pull, found


def _drained(times: Sequence[float], sizes: Sequence[float], per_byte: float) -> float:
    end = 0.0
    for ready, size in zip(times, sizes, strict=True):
        end = max(end, ready) + size * per_byte
    return end
