"""What a Slurm job finds: facts of every node, and a sum over all ranks. Rank 0 prints one line.

slurm_probe [SUBNET]      started by slurm_rank; the sum goes over the subnet, or over the default route
"""

import json
import os
import platform
import shutil
import socket
import sys
from pathlib import Path

from bench.worker import accelerator, fabric

MARK = "@probe "
# The level of x86-64 that a CPU has: compilers call these sets of instructions x86-64-v2 and so on.
LEVELS = {4: "avx512f", 3: "avx2", 2: "sse4_2"}


def cpu_level() -> int:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return next((level for level, flag in LEVELS.items() if flag in flags), 1)


def own_address() -> str:
    """The address of the interface with the default route, or else that of the host's own name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect(("192.0.2.1", 9))  # sends nothing, only selects a route
            return str(sender.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def interface(subnet: str) -> str:
    found = fabric.addresses()
    if subnet:
        return fabric.interface(subnet, found)
    own = own_address()
    return next((name for name, address in found if address == own), "")


def facts(subnet: str) -> dict[str, object]:
    import torch

    return {
        "node": socket.gethostname(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_level": cpu_level(),
        "cores": len(os.sched_getaffinity(0)),
        "interface": interface(subnet),
        "interfaces": dict(fabric.addresses()),
        "adapters": sorted(path.name for path in Path("/sys/class/infiniband").glob("*")),
        "mpi": shutil.which("mpirun") or "",
        "nccl": accelerator.nccl_version(),
        "gpus": accelerator.names(),
    }


def main() -> None:
    subnet = sys.argv[1] if len(sys.argv) > 1 else ""
    own = facts(subnet)
    os.environ |= {"HOROVOD_GLOO_IFACE": str(own["interface"]), "GLOO_SOCKET_IFNAME": str(own["interface"])}
    import horovod
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.ones(1000), op=hvd.Sum, name="probe")
    nodes = hvd.allgather_object(own | {"horovod": horovod.__version__}, name="facts")
    right = bool((total == hvd.size()).all())
    if hvd.rank() == 0:
        print(MARK + json.dumps({"ranks": hvd.size(), "right": right, "nodes": nodes}), flush=True)
    hvd.shutdown()
    # An ordinary exit can be aborted by Gloo's threads.
    os._exit(0)
