"""The clock of a rank's GPU, and the cores next to it. Standard library only: a made-up sysfs tests it."""

import os
import re
from pathlib import Path

from bench.worker import topology

# nvidia-smi underlines the head of its matrix.
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def ask(gpu: str | None, field: str) -> str | None:
    """A field of nvidia-smi; None where it does not answer."""
    if gpu is None:
        return None
    return topology.output("nvidia-smi", f"--id={gpu}", f"--query-gpu={field}", "--format=csv,noheader,nounits") or None


def clock_mhz(gpu: str | None) -> float | None:
    try:
        return float(ask(gpu, "clocks.sm") or "")
    except ValueError:
        # nvidia-smi writes "[N/A]" for what a GPU does not tell.
        return None


def topology_matrix() -> str:
    return topology.output("nvidia-smi", "topo", "-m")


def links(matrix: str) -> dict[str, int]:
    """How many pairs of GPUs each kind of link connects, such as {"NV12": 28} or {"PHB": 1, "SYS": 4}."""
    lines = [ESCAPE.sub("", line).split() for line in matrix.splitlines()]
    names = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    names = [name for name in names if re.fullmatch(r"GPU\d+", name)]
    found: dict[str, int] = {}
    for number, name in enumerate(names):
        row = next((words for words in lines if words[:1] == [name] and "X" in words[1:]), [])
        for kind in row[2 + number : 1 + len(names)]:
            found[kind] = found.get(kind, 0) + 1
    return found


def cpu_list(text: str) -> set[int]:
    """The numbers in a list of the kernel, such as 0-3,8."""
    ranges = [part.partition("-") for part in text.split(",") if part.strip()]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def local_cpus(gpu: str | None, sys: Path = topology.SYS) -> set[int]:
    """The cores of the NUMA node of a GPU; empty where the kernel does not tell, as in many virtual machines."""
    bus = ask(gpu, "pci.bus_id")
    if bus is None:
        return set()
    device = sys / "bus/pci/devices" / topology.kernel_name(bus)
    numa = topology.text(device / "numa_node")
    if numa is None or int(numa) < 0:
        return set()
    return cpu_list(topology.text(device / "local_cpulist") or "")


def bind(gpu: str | None, sys: Path = topology.SYS) -> None:
    """Keep this process, and the threads that it starts from now on, on the cores next to its GPU."""
    # The launcher or a container may allow fewer cores.
    if cores := local_cpus(gpu, sys) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)
