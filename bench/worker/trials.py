"""One process per GPU: runs the trials of a launch one after the other; rank 0 prints their results."""

from __future__ import annotations

import socket
import statistics
import time

from bench.worker import compression, counters, devices, feed, rank, step_statistics
from bench.worker.devices import Device
from bench.worker.engines import Engine
from bench.worker.protocol import (
    Gradient,
    LaunchSpec,
    Progress,
    RankReport,
    Spec,
    Step,
    TrialDone,
    TrialSpec,
    WarmUp,
    emit,
)

CHUNK = 2
LARGEST_WARMUP = 8
TARGET = 0.02
# The run at twice the scale factor only confirms: so many steps, and more of short ones.
CHECK_STEPS, CHECK_SECONDS = 3, 2.0


def run_steps(engine: Engine, device: Device, count: int) -> list[Step]:
    return [device.step(engine) for _ in range(count)]


def slowest(engine: Engine, steps: list[Step], late: bool) -> tuple[list[float], bool]:
    """Per step, the time of the slowest rank: a step is over when all are. And whether rank 0 is out of time."""
    found = engine.gather(([step.total for step in steps], late))
    return [max(times) for times in zip(*(times for times, _ in found), strict=True)], found[0][1]


def run_trial(engine: Engine, trial: TrialSpec, gradients: list[Gradient]) -> None:
    rank.set_rate(trial, engine.local_rank)
    engine.barrier()
    engine = compression.wrap(engine, trial.compression)
    source = feed.make(trial, engine)
    device = devices.make(trial, gradients, engine, source)
    started = time.perf_counter()
    seen: list[float] = []
    while True:
        chunk = run_steps(engine, device, CHUNK)
        times, late = slowest(engine, chunk, time.perf_counter() - started > trial.seconds)
        seen += times
        if engine.rank == 0:
            emit(WarmUp(trial.id, seen[-1]))
        if trial.check or late or step_statistics.settled(seen) or len(seen) >= LARGEST_WARMUP:
            break
    device.check(engine)
    warm = time.perf_counter()
    mine: list[Step] = []
    seen = []
    engine.barrier()
    nics, cpu = counters.sent_bytes(), counters.cpu_times()
    source.start()
    count, seconds = (CHECK_STEPS, CHECK_SECONDS) if trial.check else (CHUNK, trial.seconds)
    while True:
        chunk = run_steps(engine, device, count)
        mine += chunk
        times, late = slowest(engine, chunk, time.perf_counter() - warm > seconds)
        seen += times
        if engine.rank == 0:
            emit(Progress(trial.id, trial.images / statistics.median(seen)))
        if late or (not trial.check and step_statistics.half_width(seen) <= TARGET):
            break
    sent = {name: (count - nics[name]) / len(mine) for name, count in counters.sent_bytes().items() if name in nics}
    busy, total = (after - before for after, before in zip(counters.cpu_times(), cpu, strict=True))
    report = RankReport(socket.gethostname(), engine.local_rank, mine, sent, source.report())
    reports = engine.gather(report)
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
                warmup_s=warm - started,
                measure_s=time.perf_counter() - warm,
            )
        )


def run_trials(engine: Engine, spec: Spec, launch: LaunchSpec) -> None:
    for trial in launch.trials:
        run_trial(engine, trial, spec.gradients.get(trial.model, []))


def main() -> None:
    rank.serve(run_trials)
