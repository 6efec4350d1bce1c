"""The scale model's factor s: bytes and link rate are both divided by it, so transfer times stay what they are.

The larger s, the less CPU the bytes cost this machine, and the more a step's fixed costs (negotiation, wake-ups) weigh.
"""

from __future__ import annotations

# What this machine moves between all nodes at once without its CPU becoming the limit, in Gbit/s.
BUDGET_GBPS = 0.5
SMALLEST = 2.0
# Beyond this, Horovod's own negotiation is no longer small against the gradients.
LARGEST = 200.0
TOLERANCE = 0.05


def factor(nodes: int, rate_gbps: float) -> float:
    """s for a point: from nodes x rate, so that the machine keeps idle CPU."""
    if nodes == 1:
        # No network to be true to: the less is copied, the less this machine disturbs the device's time.
        return LARGEST
    return min(max(round(nodes * rate_gbps / BUDGET_GBPS, 1), SMALLEST), LARGEST)


def converged(ratio: float) -> bool:
    """Whether the step at 2s took as long as at s: then neither CPU nor fixed costs decided it."""
    return abs(ratio - 1) <= TOLERANCE
