"""What a measured point would do on another network: the figures of the verdict that nobody measured."""

from __future__ import annotations

from dataclasses import dataclass

HIDDEN_SHARE = 0.55  # of compute: the part of backward during which gradients are already on their way
TAIL = 0.04  # of communication: the last gradients have no compute left to hide behind


@dataclass(frozen=True)
class Situation:
    """One measured multi-node point, in ms per step and Gbit/s."""

    rate_gbps: float
    compute_ms: float
    exposed_ms: float
    comm_ms: float
    other_ms: float
    base_step_ms: float


def efficiency_at(situation: Situation, rate_gbps: float) -> float:
    comm = situation.comm_ms * situation.rate_gbps / rate_gbps
    hidden = max(situation.comm_ms - situation.exposed_ms, HIDDEN_SHARE * situation.compute_ms)
    exposed = max(comm - hidden, TAIL * comm)
    return min(1.0, situation.base_step_ms / (situation.compute_ms + exposed + situation.other_ms))


def rate_for(situation: Situation, target: float, most_gbps: float = 800.0) -> float | None:
    """The smallest rate that reaches the target; None when no network does."""
    if efficiency_at(situation, most_gbps) < target:
        return None
    low, high = situation.rate_gbps / 64, most_gbps
    for _ in range(60):
        mid = (low * high) ** 0.5
        low, high = (low, mid) if efficiency_at(situation, mid) >= target else (mid, high)
    return high
