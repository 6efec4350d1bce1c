"""The scale model's two factors.

s, the scale: bytes and link rate are both divided by it, so transfer times stay what they are. The larger s, the less
CPU the bytes cost this machine, and the more a step's fixed costs (negotiation, wake-ups) weigh.

t, the slowdown: compute and transfers both take t times as long, and every time that is measured is divided by t. What
this machine adds of its own then weighs t times less.
"""

from __future__ import annotations

# What this machine moves between all nodes at once without its CPU becoming the limit, in Gbit/s.
BUDGET_GBPS = 0.5
SMALLEST = 2.0
# Beyond this, Horovod's own negotiation is no longer small against the gradients.
LARGEST = 200.0
TOLERANCE = 0.05
# A ring of n nodes has 2(n - 1) steps, in each of which this machine wakes n ranks one after the other on its few
# cores; real nodes wake at once. On ten at 10 Gbit/s a step of 230 ms took 300 for that, and 240 with t = 2.
SLOWED_NODES = 4
# Where the wire takes a second or more for a step, that is little; and a sweep has no time for twice as much.
SLOWED_RATE_GBPS = 2.0
SLOWDOWN = 2.0
# MPI's ranks ask and need not be woken. Where the wire takes little of a step too, ten nodes came within 3% without.
UNSLOWED_MPI_GBPS = 20.0


def slowdown(nodes: int, rate_gbps: float, engine: str) -> float:
    """t for a point."""
    if nodes < SLOWED_NODES or rate_gbps <= SLOWED_RATE_GBPS:
        return 1.0
    return 1.0 if engine == "horovod-mpi" and rate_gbps > UNSLOWED_MPI_GBPS else SLOWDOWN


def factor(nodes: int, rate_gbps: float, slowed: float = 1.0) -> float:
    """s for a point: from nodes x rate, so that the machine keeps idle CPU."""
    if nodes == 1:
        # No network to be true to: the less is copied, the less this machine disturbs the device's time.
        return LARGEST
    return min(max(round(nodes * rate_gbps / BUDGET_GBPS / slowed, 1), SMALLEST), LARGEST)


def converged(ratio: float) -> bool:
    """Whether the step at 2s took as long as at s: then neither CPU nor fixed costs decided it."""
    return abs(ratio - 1) <= TOLERANCE
