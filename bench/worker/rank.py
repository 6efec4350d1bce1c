"""The frame of every rank: read the spec, set the link rate, start the engine, end with the launcher."""

import argparse
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

import torch

from bench.worker import accelerator, engines, fabric, gpu_info
from bench.worker.accelerator import Accelerator
from bench.worker.engines import Engine
from bench.worker.protocol import (
    Failed,
    Finished,
    LaunchSpec,
    LearnSpec,
    Spec,
    Started,
    TrialSpec,
    emit,
    print_by_line,
    read_spec,
)
from bench.worker.shards import DataError

PR_SET_PDEATHSIG = 1
# What Gloo says in all ranks that were connected to one that ended.
LOST = re.compile("Connection (closed|reset) by peer")


def local_rank() -> int:
    # LOCAL_RANK first: mpirun starts one torchrun per node, whose ranks all inherit MPI's number 0.
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_LOCAL_RANK")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))


def set_rate(spec: LaunchSpec | TrialSpec | LearnSpec, local: int) -> None:
    if spec.rate_mbit is not None and local == 0:
        burst = [] if spec.burst_ms is None else [str(spec.burst_ms)]
        subnet = os.environ.get(fabric.VARIABLE, "").partition(" ")[2]
        where = ["on", subnet] if subnet else []
        command = ["sudo", "-n", "/usr/local/sbin/fabric-rate", "set", str(spec.rate_mbit), *burst, *where]
        subprocess.run(command, check=True)


def start(launch: LaunchSpec) -> tuple[Accelerator, Engine]:
    """The rank's device and its engine, which allocates on the current device: so the device comes first.

    The engine's threads, and those of the loader later, stay on the cores of this one.
    """
    fabric.use()
    device = accelerator.make(launch.cuda, local_rank())
    gpu_info.bind(device.gpu)
    return device, engines.make(launch.engine, launch.cuda)


def serve(work: Callable[[Engine, Accelerator, Spec, LaunchSpec], None]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    print_by_line()
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True, help="path of the spec file")
    parser.add_argument("--sha256", required=True, help="checksum of the spec file")
    parser.add_argument("--part", type=int, default=0, help="index of the launch in the spec")
    parser.add_argument("--launch", required=True, help="id by which the supervisor finds the processes of a launch")
    args = parser.parse_args()
    spec = read_spec(args.spec, args.sha256)
    launch = spec.launches[args.part]
    # A connection keeps the packet size it started with, so the rate is set before the ranks connect.
    set_rate(launch, local_rank())
    device, engine = start(launch)
    if launch.one_thread:
        torch.set_num_threads(1)
    if engine.rank == 0:
        emit(Started(engine.size))
    try:
        work(engine, device, spec, launch)
    except DataError as error:
        # Every rank reports this itself: its peers only see a lost connection.
        emit(Failed(str(error)))
        os._exit(1)
    except RuntimeError as error:
        end_if_lost(engine, error)
        raise
    engine.barrier()
    if engine.rank == 0:
        emit(Finished())
    leave(engine)


def end_if_lost(engine: Engine, error: RuntimeError) -> None:
    """One line instead of a traceback per rank if another rank ended; the launcher names the one that did."""
    if LOST.search(str(error)):
        print(f"Error: rank {engine.rank} lost its connection to a rank that ended", file=sys.stderr, flush=True)
        os._exit(1)


def leave(engine: Engine) -> NoReturn:
    """End the process at once: at an ordinary exit a thread of Gloo that is still running can abort it."""
    engine.close()
    sys.stdout.flush()
    os._exit(0)
