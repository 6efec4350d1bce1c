"""One process per GPU: runs the trials of a launch one after the other and reports them as JSON lines from rank 0.

The whole launch is in --spec (base64 JSON). Nothing is asked for meanwhile, so any launcher can start it.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
# With the launcher gone nobody would end us.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)

from bench.worker import compression, counters, devices, engines, feed  # noqa: E402
from bench.worker import step_statistics as statistics  # noqa: E402
from bench.worker.shards import DataError  # noqa: E402

CHUNK = 2
LARGEST_WARMUP = 8
TARGET = 0.02
# The run at 2s only confirms: so many steps, and more of short ones.
CHECK_STEPS, CHECK_SECONDS = 3, 2.0


def emit(event: str, **values: Any) -> None:
    print("@bench " + json.dumps({"event": event, **values}), flush=True)


def local_rank() -> int:
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK", "LOCAL_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


def set_rate(trial: dict[str, Any], rank: int) -> None:
    if trial["rate_mbit"] is not None and rank == 0:
        burst = [] if trial["burst_ms"] is None else [str(trial["burst_ms"])]
        subprocess.run(
            ["sudo", "-n", "/usr/local/sbin/fabric-rate", "set", str(trial["rate_mbit"]), *burst], check=True
        )


def run_steps(engine: Any, device: Any, count: int) -> list[devices.Step]:
    return [device.step(engine) for _ in range(count)]


def slowest(engine: Any, steps: list[devices.Step], late: bool) -> tuple[list[float], bool]:
    """Per step, the time of the slowest rank: a step is over when all are. And whether rank 0 finds it late."""
    found = engine.gather(([step[0] for step in steps], late))
    return [max(times) for times in zip(*(times for times, _ in found), strict=True)], found[0][1]


def run_trial(engine: Any, trial: dict[str, Any]) -> None:
    set_rate(trial, engine.local_rank)
    engine.barrier()
    engine = compression.wrap(engine, trial["compression"])
    source = feed.make(trial, engine)
    device = devices.make(trial, engine, source)
    started = time.perf_counter()
    seen: list[float] = []
    while True:
        chunk = run_steps(engine, device, CHUNK)
        times, late = slowest(engine, chunk, time.perf_counter() - started > trial["seconds"])
        seen += times
        if engine.rank == 0:
            emit("warmup", id=trial["id"], step_s=seen[-1])
        if trial["check"] or late or statistics.settled(seen) or len(seen) >= LARGEST_WARMUP:
            break
    device.check(engine)
    warm = time.perf_counter()
    mine: list[devices.Step] = []
    seen = []
    engine.barrier()
    nics, cpu = counters.sent_bytes(), counters.cpu_times()
    source.start()
    count, seconds = (CHECK_STEPS, CHECK_SECONDS) if trial["check"] else (CHUNK, trial["seconds"])
    while True:
        chunk = run_steps(engine, device, count)
        mine += chunk
        times, late = slowest(engine, chunk, time.perf_counter() - warm > seconds)
        seen += times
        if engine.rank == 0:
            emit("progress", id=trial["id"], images_per_second=trial["images"] / statistics.median(seen))
        if late or (not trial["check"] and statistics.half_width(seen) <= TARGET):
            break
    sent = {name: (count - nics[name]) / len(mine) for name, count in counters.sent_bytes().items() if name in nics}
    busy, total = (after - before for after, before in zip(counters.cpu_times(), cpu, strict=True))
    place = {"node": socket.gethostname(), "local": engine.local_rank}
    reports = engine.gather({**place, "steps": mine, "sent": sent, "input": source.report()})
    device.check(engine)
    source.close()
    if engine.rank == 0:
        emit(
            "trial",
            id=trial["id"],
            scale=trial["scale"],
            slowdown=trial["slowdown"],
            check=trial["check"],
            ranks=reports,
            losses=device.losses[:1] + device.losses[-1:],
            cpu=100 * busy / max(total, 1),
            warmup_s=warm - started,
            measure_s=time.perf_counter() - warm,
        )


def serve(body: Callable[[Any, dict[str, Any]], None]) -> None:
    """What every program on the nodes does around its work: body(engine, spec) is that work."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--launch", required=True, help="marks the processes of one launch")
    args = parser.parse_args()
    spec = json.loads(base64.b64decode(args.spec))
    # Connections take the packet size that is in force when they are made, so the rate comes before them.
    set_rate(spec, local_rank())
    engine = engines.make(args.engine)
    if spec["one_thread"]:
        torch.set_num_threads(1)
    if engine.rank == 0:
        emit("started", size=engine.size)
    try:
        body(engine, spec)
    except DataError as error:
        # Whichever rank it happens on: the others will only see that a peer is gone.
        emit("failed", error=str(error))
        os._exit(1)
    engine.barrier()
    if engine.rank == 0:
        emit("finished")
    engine.close()
    sys.stdout.flush()
    os._exit(0)


def run_trials(engine: Any, spec: dict[str, Any]) -> None:
    for trial in spec["trials"]:
        run_trial(engine, trial)


if __name__ == "__main__":
    serve(run_trials)
