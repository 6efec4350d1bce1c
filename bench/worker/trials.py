"""Run the trials of a launch, one process per GPU. Rank 0 prints the results."""

import math
import socket
import statistics
import time

from bench.worker import (
    compression,
    counters,
    devices,
    fabric,
    feed,
    gpu_info,
    node_link,
    pacing,
    rank,
    step_statistics,
    weight_devices,
)
from bench.worker.accelerator import Accelerator
from bench.worker.engines import Engine
from bench.worker.protocol import LaunchSpec, Progress, RankReport, Spec, Step, TrialDone, TrialSpec, WarmUp, emit

# The check at twice the scale factor is short: at least this many steps and seconds.
CHECK_STEPS, CHECK_SECONDS = 3, 2.0


def step_times_of(engine: Engine, steps: list[Step], late: bool, period: int = 1) -> tuple[list[float], bool]:
    """Time of each step over all ranks, as means between two exchanges, and whether rank 0 is out of time."""
    reports = engine.gather(([step.total for step in steps], late))
    times = step_statistics.over_ranks([times for times, _ in reports], engine.holds_weights)
    return step_statistics.windows(times, period), reports[0][1]


def run_trial(engine: Engine, accelerator: Accelerator, trial: TrialSpec, spec: Spec) -> None:
    rank.set_rate(trial, engine.local_rank)
    engine.barrier()
    engine = compression.wrap(node_link.wrap(engine, trial.node_s_per_byte), trial.compression)
    source = feed.make(trial, engine)
    device = devices.make(trial, spec.gradients.get(trial.model, []), engine, source, accelerator)
    pace = pacing.of(trial.device == "cuda", engine.holds_weights, trial.period)
    started = time.perf_counter()
    step_times: list[float] = []
    while True:
        chunk = [device.step(engine) for _ in range(pace.steps(step_times))]
        times, late = step_times_of(engine, chunk, time.perf_counter() - started > trial.seconds, trial.period)
        step_times += times
        if engine.rank == 0:
            emit(WarmUp(trial.id, step_times[-1]))
        if trial.check or late or pace.is_warm(step_times):
            break
    device.check(engine)
    clocks = [gpu_info.clock_mhz(accelerator.gpu)]
    warm_at = time.perf_counter()
    steps: list[Step] = []
    step_times = []
    engine.barrier()
    sent_before, cpu_before = counters.sent_bytes(), counters.cpu_times()
    source.start()
    seconds = CHECK_SECONDS if trial.check else trial.seconds
    check_steps = math.ceil(CHECK_STEPS / trial.period) * trial.period
    while True:
        chunk = [device.step(engine) for _ in range(check_steps if trial.check else pace.steps(step_times))]
        steps += chunk
        times, late = step_times_of(engine, chunk, time.perf_counter() - warm_at > seconds, trial.period)
        step_times += times
        if engine.rank == 0:
            emit(Progress(trial.id, trial.images / statistics.median(step_times)))
        if late or (not trial.check and pace.is_measured(step_times)):
            break
    # At once: the clock falls when the work ends.
    clocks.append(gpu_info.clock_mhz(accelerator.gpu))
    sent_after = counters.sent_bytes()
    sent = {nic: (sent_after[nic] - before) / len(steps) for nic, before in sent_before.items() if nic in sent_after}
    busy, total = (after - before for after, before in zip(counters.cpu_times(), cpu_before, strict=True))
    reports = engine.gather(
        RankReport(
            node=socket.gethostname(),
            local_rank=engine.local_rank,
            steps=steps,
            sent=sent,
            input=source.report(),
            parts=counters.parts(),
            interface=fabric.of_launch(),
            clocks_mhz=[clock for clock in clocks if clock is not None],
            not_finite=step_statistics.first_not_finite(device.losses),
            staleness=weight_devices.staleness(engine),
        )
    )
    device.check(engine)
    source.close()
    if engine.rank == 0:
        emit(
            TrialDone(
                id=trial.id,
                scale=trial.scale,
                slowdown=trial.slowdown,
                check=trial.check,
                ranks=reports,
                losses=device.losses[:1] + device.losses[-1:],
                cpu_percent=100 * busy / max(total, 1),
                warmup_s=warm_at - started,
                measure_s=time.perf_counter() - warm_at,
                precision=device.precision,
                period=trial.period,
            )
        )


def run_trials(engine: Engine, accelerator: Accelerator, spec: Spec, launch: LaunchSpec) -> None:
    for trial in launch.trials:
        run_trial(engine, accelerator, trial, spec)


def main() -> None:
    rank.serve(run_trials)
