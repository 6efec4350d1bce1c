"""The scale model's two factors.

s, the scale: bytes and link rate are both divided by it, so transfer times do not change. A larger s costs this machine
less CPU per byte, but increases the share of a step's fixed costs (negotiation, wake-ups).

t, the slowdown: compute and transfers both take t times as long, and every measured time is divided by t. The overhead
of this machine then counts t times less.
"""

from __future__ import annotations

# Total traffic between all nodes, in Gbit/s, that the CPU of this machine can move without being the limit.
BUDGET_GBPS = 0.5
SMALLEST = 2.0
# Above this, Horovod's negotiation is no longer small compared with the gradients.
LARGEST = 200.0
TOLERANCE = 0.05
# A ring of n nodes has 2(n - 1) steps. In each, this machine wakes n ranks one after the other on its few cores; real
# nodes wake at once. With ten nodes at 10 Gbit/s a step of 230 ms therefore took 300 ms, and 240 ms with t = 2.
SLOWED_NODES = 4
# On slower links a step takes a second or more: the error is small, and the sweep would take twice as long.
SLOWED_RATE_GBPS = 2.0
SLOWDOWN = 2.0
# With several ranks per node these wake-ups decide sooner. More Gbit/s than this in all ranks together run slower.
RANKS_GBPS = 40.0
SLOWEST = 10.0
# MPI's ranks poll and need no wake-up. On fast links ten nodes came within 3% without the slowdown.
UNSLOWED_MPI_GBPS = 20.0


def slowdown(nodes: int, rate_gbps: float, engine: str, gpus_per_node: int = 1) -> float:
    """t for a point."""
    if gpus_per_node > 1:
        return min(max(1.0, round(nodes * gpus_per_node * rate_gbps / RANKS_GBPS, 1)), SLOWEST)
    if nodes < SLOWED_NODES or rate_gbps <= SLOWED_RATE_GBPS:
        return 1.0
    return 1.0 if engine == "horovod-mpi" and rate_gbps > UNSLOWED_MPI_GBPS else SLOWDOWN


def factor(nodes: int, rate_gbps: float, slowed: float = 1.0, gpus_per_node: int = 1) -> float:
    """s for a point, from ranks x rate, such that the machine keeps idle CPU: every rank of a ring sends all bytes."""
    if nodes == 1:
        # No network to model: copying less disturbs the device's time less.
        return LARGEST
    return min(max(round(nodes * gpus_per_node * rate_gbps / BUDGET_GBPS / slowed, 1), SMALLEST), LARGEST)


def converged(ratio: float) -> bool:
    """Whether a step takes the same time at twice the scale factor: then neither CPU nor fixed costs decide it."""
    return abs(ratio - 1) <= TOLERANCE
