"""Check every GPU: a product of matrices on each, and an all-reduce over all. One process per GPU.

    check_devices cuda|cpu COUNT SECONDS

COUNT elements are summed for SECONDS. Rank 0 prints one event. With cpu the same runs where there is no GPU.
"""

import os
import socket
import sys
from typing import Any

import torch

from bench.worker import accelerator, gpu_info, rank
from bench.worker.accelerator import Accelerator
from bench.worker.collectives import run_case
from bench.worker.protocol import CaseSpec, DeviceReport, DevicesDone, Failed, LaunchSpec, emit

# Products of so many -1 and 1 are integers that bf16 holds exactly.
SIDE = 256


def product(device: Accelerator, side: int = SIDE) -> tuple[str, bool]:
    """The type that the device multiplied in, and whether its product is that of the CPU."""
    generator = torch.Generator().manual_seed(5)
    a, b = (2.0 * torch.randint(0, 2, (side, side), generator=generator) - 1.0 for _ in range(2))
    dtype: Any = torch.bfloat16 if device.ampere else torch.float32
    found = a.to(device.place, dtype) @ b.to(device.place, dtype)
    device.wait(device.mark())
    return "bf16" if device.ampere else "fp32", torch.equal(found.to("cpu", torch.float32), a @ b)


def report(device: Accelerator, local: int) -> DeviceReport:
    dtype, right = product(device)
    return DeviceReport(
        node=socket.gethostname(),
        local_rank=local,
        seen=accelerator.count(),
        driver=gpu_info.ask(device.gpu, "driver_version") or "",
        product=dtype,
        right=right,
        links=gpu_info.links(gpu_info.topology_matrix()) if device.gpu and local == 0 else {},
        **device.facts(),
    )


def main() -> None:
    cuda, count, seconds = sys.argv[1] == "cuda", int(sys.argv[2]), float(sys.argv[3])
    local = rank.local_rank()
    if cuda and local >= (seen := accelerator.count()):
        wanted = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", local + 1)
        emit(Failed(f"{socket.gethostname()}: torch sees {seen} of {wanted} GPUs as the training account"))
        sys.exit(1)
    device, engine = rank.start(LaunchSpec("horovod-mpi", cuda=cuda))
    mine = report(device, local)
    done = run_case(CaseSpec("all_reduce", "all_reduce", count, seconds), engine, device)
    reports = engine.gather(mine)
    if engine.rank == 0:
        emit(DevicesDone(reports, 4 * count, done.times, done.errors))
    rank.leave(engine)
