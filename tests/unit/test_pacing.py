"""How long a trial warms up and measures: on GPUs until their clocks have settled."""

import statistics
from itertools import accumulate

import pytest

from bench.sweep import record
from bench.worker import pacing
from bench.worker.protocol import RankReport, Step


def steps_until(decide, times):
    """Steps after which a trial with these times goes on, decided after each chunk; None if never."""
    count = 0
    while count < len(times):
        count += pacing.GPU.steps(times[:count])
        if decide(times[:count]):
            return count
    return None


def test_gpu_is_measured_after_its_clock_has_fallen():
    """Boost clock for 12 s, then steps that are 8% longer: a median of the first seconds is not the GPU's."""
    times = [0.1] * 120 + [0.108] * 400
    warm = steps_until(pacing.GPU.is_warm, times)
    end = steps_until(pacing.GPU.is_measured, times[warm:])
    assert statistics.median(times[warm : warm + end]) == 0.108


def test_clock_that_falls_all_the_time_never_counts_as_settled():
    times = list(accumulate([0.1] + [0.001] * 400))
    assert steps_until(pacing.GPU.is_warm, times) is None
    assert steps_until(pacing.GPU.is_measured, times) is None


def test_long_steps_are_decided_on_more_often():
    """The controller ends a launch that prints nothing for 25 s."""
    assert [pacing.GPU.steps([seconds]) for seconds in (0.1, 1.0, 6.0)] == [10, 5, 2]
    assert pacing.GPU.steps([]) == 2


@pytest.mark.parametrize("drift", [0.05, -0.05])
def test_gpu_whose_second_half_is_slower_or_faster_is_measured_for_longer(drift):
    times = [0.1] * 100 + [0.1 * (1 + drift)] * 100
    assert not pacing.GPU.is_measured(times)
    assert pacing.GPU.is_measured([0.1] * 200)


def test_short_trial_on_a_gpu_does_not_count():
    assert not pacing.GPU.is_measured([0.1] * 20) and not pacing.GPU.is_warm([0.1] * 20)


def test_emulated_device_needs_few_steps():
    assert pacing.EMULATED.is_warm([0.1, 0.1]) and pacing.EMULATED.is_warm([0.1, 0.2] * 4)
    assert not pacing.EMULATED.is_warm([0.1, 0.2]) and pacing.EMULATED.is_measured([0.1] * 6)


def test_record_says_how_steady_the_steps_and_clocks_were():
    times = [0.1, 0.1, 0.1, 0.1, 0.12, 0.12, 0.12, 0.12]
    ranks = [
        RankReport("w1", 0, [Step(seconds, 0.1, 0.0, 0.0) for seconds in times], {}, clocks_mhz=[1410.0, 1200.0]),
        RankReport("w2", 0, [Step(0.1, 0.1, 0.0, 0.0)] * 8, {}),
    ]
    found = record.steadiness(ranks)
    assert found.drift == pytest.approx(0.2) and found.spread == [0.0, 0.0]
    assert found.clocks_mhz == {"w1/0": [1410.0, 1200.0]}
    assert record.steadiness([RankReport("w1", 0, ranks[0].steps[:4], {})]) is None
