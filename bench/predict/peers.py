"""Engines whose ranks serve each other, and those that exchange weights: ps on the nodes, ps-async, easgd, local-sgd.

Every node is a worker and serves the tensors that it owns. A port carries its worker's updates out and the answers in,
and for what it owns the updates of all others in and the answers out. Tensors are not split, so the port of the owner
of a large tensor is the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bench.predict.inputs import Parameters, Setup
from bench.predict.network import collective, inside, outside
from bench.worker import placement

# They go on without each other: nobody waits for the slowest.
INDEPENDENT = ("ps-async", "easgd", "hogwild")
# They send weights in every period-th step, after it.
PERIODIC = ("easgd", "local-sgd")
ENGINES = (*INDEPENDENT, "local-sgd")


@dataclass(frozen=True)
class Exchange:
    """When the last byte of an exchange is there, the bytes that leave a node, and what limits them; in ms."""

    end: float
    wire_bytes: float
    limit: str


@lru_cache(maxsize=256)
def owners(sizes: tuple[float, ...], ranks: int) -> tuple[int, ...]:
    return tuple(placement.owners([round(size) for size in sizes], ranks))


def served(setup: Setup, parameters: Parameters, times: Sequence[float], sizes: Sequence[float]) -> Exchange:
    """An update leaves when it is ready; its owner answers."""
    ranks, g = setup.gpus, min(setup.gpus, setup.gpus_per_node)
    if setup.nodes == 1:
        within = inside(setup, parameters)
        share = 2 * (ranks - 1) / ranks
        return Exchange(drained(times, [share * size for size in sizes], 1 / (within.gbytes * 1e6)), 0.0, within.limit)
    link = outside(setup, parameters)
    # Two nodes have one flow in each direction.
    lost = (1 + parameters.incast * (1 - 1 / (setup.nodes - 1))) * (1 + parameters.server_wait * (setup.engine == "ps"))
    per_byte = lost / (link.gbytes * 1e6)
    # The ranks of a node share its port. What they send each other does not use it.
    own_node = [owner // g for owner in owners(tuple(sizes), ranks)]
    far = ranks - g
    end = 0.0
    for node in set(own_node):
        mine = [far * size if owner == node else g * size for owner, size in zip(own_node, sizes, strict=True)]
        end = max(end, drained(times, mine, per_byte))
        # An owner answers when it has the whole tensor.
        arrived = 0.0
        for ready, size, owner in zip(times, sizes, own_node, strict=True):
            if owner == node:
                arrived = max(arrived, ready) + far * size * per_byte
                end = max(end, arrived + far * size * per_byte)
    wire = 2 * g * (setup.nodes - 1) / setup.nodes * sum(sizes)
    return Exchange(end + parameters.launch_ms, wire, link.limit)


def drained(times: Sequence[float], sizes: Sequence[float], per_byte: float) -> float:
    """When a link has carried everything that becomes ready at these times."""
    end = 0.0
    for ready, size in zip(times, sizes, strict=True):
        end = max(end, ready) + size * per_byte
    return end


def exchange(setup: Setup, parameters: Parameters, times: Sequence[float], sizes: Sequence[float]) -> Exchange:
    """The exchange of one step of the engine, as the mean over a period. `times` ends when backward ends."""
    computed, payload = times[-1], sum(sizes)
    if setup.engine == "hogwild":
        # Every rank reads all shared weights and writes all updates.
        within = inside(setup, parameters)
        return Exchange(drained(times, [2 * size for size in sizes], 1 / (within.gbytes * 1e6)), 0.0, within.limit)
    if setup.engine == "local-sgd":
        ring = collective(setup, parameters)
        ranks, took = setup.gpus, ring.per_call + payload * ring.per_byte
        wire = 2 * (ranks - 1) / ranks * payload / setup.period
        return Exchange(computed + took / setup.period, wire, ring.limit)
    if setup.engine == "easgd":
        found = served(setup, parameters, [computed] * len(sizes), sizes)
        return Exchange(computed + (found.end - computed) / setup.period, found.wire_bytes / setup.period, found.limit)
    return served(setup, parameters, times, sizes)
