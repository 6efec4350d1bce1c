"""How long a trial warms up and measures. Standard library only: a made-up list of step times tests it."""

import math
from dataclasses import dataclass, replace

from bench.worker import step_statistics

TARGET_HALF_WIDTH = 0.02
# Medians of two halves that differ by less come from the same clock rate.
STEADY_HALVES = 0.01
FEWEST_STEPS, DECISION_SECONDS = 2, 5.0


@dataclass(frozen=True)
class Pace:
    """All ranks decide from the same step times, so that they end with the same step."""

    chunk: int  # most steps between two decisions
    warmup_steps: int | None  # at most
    seconds: float  # at least, for the warm-up and again for the measurement
    halves: bool  # both halves must be equally fast
    period: int = 1  # steps from one exchange of weights to the next; a decision never falls between two

    def steps(self, times: list[float]) -> int:
        """How many steps to run until the next decision: each is also a sign of life for the controller."""
        wanted = min(self.chunk, max(FEWEST_STEPS, int(DECISION_SECONDS / times[-1]))) if times else FEWEST_STEPS
        return math.ceil(wanted / self.period) * self.period

    def is_warm(self, times: list[float]) -> bool:
        if self.warmup_steps is not None:
            return step_statistics.settled(times) or len(times) >= self.warmup_steps
        # The first half has the search for the fastest convolutions, and the clocks that rise.
        return self.long_enough(times) and steady(times[len(times) // 2 :])

    def is_measured(self, times: list[float]) -> bool:
        narrow = step_statistics.half_width(times) <= TARGET_HALF_WIDTH
        return narrow and self.long_enough(times) and (not self.halves or steady(times))

    def long_enough(self, times: list[float]) -> bool:
        return sum(times) >= self.seconds


def steady(times: list[float]) -> bool:
    drift = step_statistics.drift(times)
    return drift is not None and abs(drift) <= STEADY_HALVES


EMULATED = Pace(chunk=2, warmup_steps=8, seconds=0.0, halves=False)
# A decision gathers all ranks. Without a barrier in their steps they should rarely meet.
ASYNCHRONOUS_CHUNK = 12
# A GPU lowers its clock within seconds of full load, when it reaches its limit of power or heat.
GPU = Pace(chunk=10, warmup_steps=None, seconds=8.0, halves=True)


def of(cuda: bool, asynchronous: bool = False, period: int = 1) -> Pace:
    pace = replace(GPU if cuda else EMULATED, period=period)
    return replace(pace, chunk=ASYNCHRONOUS_CHUNK) if asynchronous else pace
