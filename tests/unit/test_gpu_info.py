"""Ranks and their threads run on the cores next to their GPU, on a made-up sysfs and nvidia-smi."""

import os
import threading

import pytest

from bench.worker import gpu_info, topology

# Two sockets; the kernel numbers the second threads of the cores last.
NODES = {"0": "0-1,8-9", "1": "4-7,12"}


# Constructed after the format of nvidia-smi 580. Not recorded.
MATRIX = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_links_between_gpus_are_counted_by_kind():
    assert gpu_info.links(MATRIX) == {"NV12": 1, "SYS": 2}
    assert gpu_info.links("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n") == {}
    assert gpu_info.links("") == {}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """GPU-a is on NUMA node 0, GPU-b on node 1, and the kernel does not know where GPU-c is."""
    for number, numa in enumerate(("0", "1", "-1")):
        device = tmp_path / f"bus/pci/devices/0000:{number}b:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")
        (device / "local_cpulist").write_text(NODES.get(numa, "0-15") + "\n")
    asked = {f"--id=GPU-{name}": f"00000000:{number}B:00.0" for number, name in enumerate("abc")}

    def nvidia_smi(*argv):
        return asked.get(argv[1], "") if "pci.bus_id" in argv[2] else {"--id=GPU-a": "1410"}.get(argv[1], "[N/A]")

    monkeypatch.setattr(topology, "output", nvidia_smi)
    allowed = set(range(14))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))

    def bind(pid, cores):
        allowed.intersection_update(cores)

    monkeypatch.setattr(os, "sched_setaffinity", bind)
    return tmp_path


@pytest.mark.parametrize(
    ("gpu", "cores"),
    [
        ("GPU-a", {0, 1, 8, 9}),
        ("GPU-b", {4, 5, 6, 7, 12}),
        ("GPU-c", set(range(14))),
        ("GPU-unknown", set(range(14))),
        (None, set(range(14))),
    ],
)
def test_rank_stays_on_the_numa_node_of_its_gpu(machine, gpu, cores):
    gpu_info.bind(gpu, machine)
    assert os.sched_getaffinity(0) == cores


def test_rank_that_may_use_none_of_these_cores_keeps_its_own(machine):
    os.sched_setaffinity(0, {2, 3})
    gpu_info.bind("GPU-a", machine)
    assert os.sched_getaffinity(0) == {2, 3}


def test_threads_that_a_bound_process_starts_are_bound_too(tmp_path, monkeypatch):
    """On this machine's own cores: the loader's and the engine's threads inherit what the rank set."""
    before = os.sched_getaffinity(0)
    core = min(before)
    monkeypatch.setattr(gpu_info, "local_cpus", lambda gpu, sys: {core})
    found = []

    def rank():
        gpu_info.bind("GPU-a")
        inner = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        inner.start()
        inner.join()

    outer = threading.Thread(target=rank)
    outer.start()
    outer.join()
    assert found == [{core}] and os.sched_getaffinity(0) == before


def test_clock_is_unknown_where_nvidia_smi_does_not_tell(machine):
    assert gpu_info.clock_mhz("GPU-a") == 1410
    assert gpu_info.clock_mhz("GPU-b") is None and gpu_info.clock_mhz(None) is None
