"""Whether steps have settled, the interval of their median, and their losses. Standard library only: runs on nodes."""

import math
import statistics
from itertools import accumulate

CONFIDENCE = 0.95
STEADY = 0.05
SMALLEST_SAMPLE = 6


def median_interval(values: list[float]) -> tuple[float, float]:
    """Interval of the median from order statistics, valid for any distribution.

    With fewer than six values no such interval reaches 95%; the whole range is returned.
    """
    ordered = sorted(values)
    n = len(ordered)
    # P(median lies outside the k-th smallest and largest) = 2 * P(Binomial(n, 1/2) < k)
    tails = accumulate(math.comb(n, k) / 2**n for k in range(n // 2))
    k = max(1, sum(2 * tail <= 1 - CONFIDENCE for tail in tails))
    return ordered[k - 1], ordered[n - k]


def half_width(values: list[float]) -> float:
    """Half the interval, relative to the median; infinite with too few values."""
    if len(values) < SMALLEST_SAMPLE:
        return float("inf")
    low, high = median_interval(values)
    return (high - low) / 2 / statistics.median(values)


def settled(values: list[float]) -> bool:
    """Whether the last two steps took the same time."""
    return len(values) > 1 and abs(values[-1] / values[-2] - 1) <= STEADY


def halves(values: list[float]) -> tuple[list[float], list[float]] | None:
    """First and second half; None with too few values."""
    middle = len(values) // 2
    return (values[:middle], values[middle:]) if len(values) >= SMALLEST_SAMPLE else None


def drift(values: list[float]) -> float | None:
    """Median of the second half over that of the first, less one; None with too few values."""
    parts = halves(values)
    return statistics.median(parts[1]) / statistics.median(parts[0]) - 1 if parts else None


def over_ranks(times: list[list[float]], independent: bool) -> list[float]:
    """Time of each step from those of all ranks: of the slowest, which the others wait for.

    Independent ranks do not wait. Then it is the step with which equal ranks would process as many images per second.
    """
    combine = statistics.harmonic_mean if independent else max
    return [combine(steps) for steps in zip(*times, strict=True)]


def windows(values: list[float], length: int) -> list[float]:
    """Means of so many values at a time: of the steps from one exchange of weights to the next."""
    whole = len(values) - len(values) % length
    return [sum(values[at : at + length]) / length for at in range(0, whole, length)]


def spread(values: list[float]) -> float:
    """Distance between the quartiles, relative to the median."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def first_not_finite(losses: list[float]) -> int | None:
    """The first step, counted from 1, whose loss is NaN or infinite."""
    return next((step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
