"""Which stack, kernel module and driver made-up machines get, from Fermi to Blackwell, or why they are refused."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from cluster import cpus, gpus
from cluster.core import config
from cluster.core.errors import UserError

HASWELL = (
    "fpu sse sse2 ht pni ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt xsave avx f16c lahf_lm abm bmi1 avx2 bmi2 avx512f"
)
IVY_BRIDGE = "fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt xsave avx f16c lahf_lm"
# PCI id, a card with it, its generation
CARDS = [
    ("06d1", "Tesla C2050", "fermi"),
    ("102d", "Tesla K80", "kepler"),
    ("118f", "Tesla K10", "kepler"),
    ("13f2", "Tesla M60", "maxwell"),
    ("17fd", "Tesla M40", "maxwell"),
    ("1b80", "GTX 1080", "pascal"),
    ("15f9", "Tesla P100 SXM2", "pascal"),
    ("1db1", "Tesla V100 SXM2", "volta"),
    ("1db6", "Tesla V100 PCIe 32GB", "volta"),
    ("1eb8", "Tesla T4", "turing"),
    ("2182", "GTX 1660 Ti", "turing"),
    ("20b2", "A100 SXM4 80GB", "ampere"),
    ("2235", "A40", "ampere"),
    ("26b9", "L40S", "ada"),
    ("2330", "H100 SXM", "hopper"),
    ("2335", "H200", "hopper"),
    ("2901", "B200", "blackwell"),
    ("2bb1", "RTX PRO 6000", "blackwell"),
]
# generation -> CUDA stack, kernel module
NEEDS = {
    **dict.fromkeys(("maxwell", "pascal", "volta"), ("12", "proprietary")),
    **dict.fromkeys(("turing", "ampere", "ada", "hopper", "blackwell"), ("13", "open")),
}


def machine(name: str, *devices: str, **changes: object) -> gpus.Machine:
    facts = {"system": "debian", "release": "bookworm", "kernel": "6.1.0-9", "headers": "installed", "gpus": devices}
    return gpus.Machine(name=name, **{**facts, **changes})


@pytest.mark.parametrize(("device", "card", "generation"), CARDS)
def test_every_generation_gets_its_stack_module_and_driver_or_is_refused(device, card, generation):
    assert gpus.of_id(device).name == generation, card
    if generation not in NEEDS:
        with pytest.raises(UserError, match=rf"^w1: {generation.title()} GPUs are too old: their last driver is \d+"):
            gpus.stack_for([machine("w1", device)])
        return
    stack, module = NEEDS[generation]
    assert gpus.stack_for([machine("w1", device)]) == stack
    assert gpus.module_for(machine("w1", device)) == module
    wanted = f"(10de:{device}): CUDA {gpus.stacks()[stack].cuda}, driver 580 with the {module} kernel module"
    assert wanted in gpus.summary(machine("w1", device), stack)


@pytest.mark.parametrize("generation", [one for one in gpus.generations() if one.stacks], ids=lambda one: one.name)
def test_driver_that_is_installed_supports_the_generation_and_runs_its_stacks(generation):
    assert generation.driver in (0, *range(gpus.branch(), 1000))
    for stack in generation.stacks:
        assert gpus.number(config.versions()["nvidia_driver"]) >= gpus.number(gpus.stacks()[stack].driver)


@pytest.mark.parametrize(
    ("devices", "stack"),
    [
        (("1db4", "20b0"), "12"),
        (("1b80", "1eb8", "2330"), "12"),
        (("1eb8", "2901"), "13"),
        (("20b0", "2330"), "13"),
    ],
)
def test_mixed_cluster_gets_the_stack_that_serves_all(devices, stack):
    assert gpus.stack_for([machine(f"w{i}", one) for i, one in enumerate(devices)]) == stack
    assert gpus.stack_for([machine("w1", *devices)]) == stack


def test_volta_and_blackwell_have_no_common_stack():
    with pytest.raises(UserError) as caught:
        gpus.stack_for([machine("head", "1db4"), machine("w1", "20b0"), machine("w2", "2901")])
    assert str(caught.value) == (
        "head has Volta (only CUDA 12.6) and w2 has Blackwell (only CUDA 13.0): no CUDA version supports both; "
        "leave one of them out of cluster.yml"
    )


def test_machine_with_old_and_new_gpus_gets_the_module_that_drives_both():
    assert gpus.module_for(machine("w1", "1db4", "20b0")) == "proprietary"
    with pytest.raises(UserError, match="w1: no kernel module drives Blackwell and Volta GPUs in one machine"):
        gpus.module_for(machine("w1", "1db4", "2901"))


def test_unknown_gpu_is_named_in_one_line_unless_its_driver_works():
    with pytest.raises(UserError, match=r"^w1: GPU 10de:3f00 is not in roles/nvidia_driver/files/gpus.yml; [^\n]*$"):
        gpus.stack_for([machine("w1", "3f00")])
    working = machine("w1", "3f00", loaded="610.10", capabilities=(11.0,))
    assert gpus.stack_for([working]) == "13"
    assert gpus.keeps(working, "13")


@pytest.mark.parametrize(
    ("loaded", "stack", "stays"),
    [("580.65.06", "13", True), ("575.57", "13", False), ("525.60.13", "12", True), ("470.256", "12", False)],
)
def test_driver_that_works_and_is_new_enough_for_the_stack_stays(loaded, stack, stays):
    device = "1db4" if stack == "12" else "20b0"
    found = machine("w1", device, loaded=loaded, capabilities=(8.0,))
    assert gpus.keeps(found, stack) is stays
    assert (f"driver {loaded} works and stays" in gpus.summary(found, stack)) is stays
    # A module that is loaded but drives no GPU, such as the open one with a V100, is replaced.
    assert not gpus.keeps(machine("w1", device, loaded=loaded), stack)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"secure_boot": "no"}, "Secure Boot is on"),
        ({"secure_boot": "yes"}, ""),
        ({"headers": "missing"}, "apt has no linux-headers-6.1.0-9"),
        ({"headers": "available"}, ""),
        ({"held": ("nvidia-driver-535",)}, "apt-mark unhold nvidia-driver-535"),
    ],
)
def test_obstacle_is_named_only_if_a_driver_must_be_installed(facts, message):
    found = gpus.obstacle(machine("w1", "20b0", **facts), "13")
    assert message in found
    assert bool(found) is bool(message)
    assert gpus.obstacle(machine("w1", "20b0", loaded="580.1", capabilities=(8.0,), **facts), "13") == ""
    assert gpus.obstacle(machine("w1", **facts), "13") == ""


def test_blocks_of_two_generations_do_not_overlap():
    blocks = sorted(block for one in gpus.generations() for block in one.pci)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(blocks))


def test_stack_before_there_are_machines_follows_from_the_models_in_cluster_yml():
    assert gpus.expected(["V100"]) == gpus.expected(["gtx1080", "t4"]) == "12"
    assert gpus.expected(["t4"]) == gpus.expected([]) == gpus.expected(["something new"]) == "13"


class Tree:
    """A made-up machine: what look.sh reads, and the tools that it calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("etc/os-release", 'ID=ubuntu\nVERSION_CODENAME=noble\nNAME="Ubuntu"\n')
        self.write("proc/cpuinfo", f"processor : 0\nflags\t\t: {IVY_BRIDGE}\n\nprocessor : 1\nflags\t\t: x\n")
        self.write("proc/modules", "ext4 1 1 - Live 0x0\n")
        self.device("00:01.0", "0x8086", "0x030000", "0x1234")
        for name, text in (("uname", "echo 6.8.0-1"), ("apt-mark", ""), ("apt-cache", "exit 100")):
            self.tool(name, text)

    def write(self, path: str, content: str | bytes) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def device(self, slot: str, vendor: str, kind: str, device: str) -> None:
        for name, value in (("vendor", vendor), ("class", kind), ("device", device)):
            self.write(f"pci/{slot}/{name}", f"{value}\n")

    def tool(self, name: str, body: str) -> None:
        self.write(f"bin/{name}", f"#!/bin/sh\n{body}\n")
        (self.root / "bin" / name).chmod(0o755)

    def look(self) -> gpus.Machine:
        path = f"{self.root}/bin:/usr/bin:/bin"
        argv = ["sh", str(gpus.FILES / "look.sh"), f"{self.root}/pci", str(self.root)]
        done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": path}, check=True)
        return gpus.parse("w1", done.stdout)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_look_finds_release_cpu_gpus_and_switches(tree):
    tree.device("00:1e.0", "0x10de", "0x030200", "0x2330")
    tree.device("00:1f.0", "0x10de", "0x030000", "0x2330")
    tree.device("00:20.0", "0x10de", "0x068000", "0x22a3")
    tree.device("00:21.0", "0x10de", "0x040300", "0x22a4")
    found = tree.look()
    assert (found.system, found.release, found.kernel) == ("ubuntu", "noble", "6.8.0-1")
    assert (found.gpus, found.switches, found.works) == (("2330", "2330"), 1, False)
    assert found.cpu == frozenset(IVY_BRIDGE.split())
    assert (found.secure_boot, found.headers, found.held, found.nouveau) == ("", "", (), False)


def test_look_tells_a_driver_that_works_from_one_that_does_not_bind(tree):
    tree.device("00:1e.0", "0x10de", "0x030200", "0x1db4")
    tree.write("sys/module/nvidia/version", "580.105.08\n")
    tree.tool("nvidia-smi", "echo 'No devices were found'; exit 6")
    assert (tree.look().loaded, tree.look().works) == ("580.105.08", False)
    tree.tool("nvidia-smi", "echo 7.0")
    assert (tree.look().capabilities, tree.look().works) == ((7.0,), True)


@pytest.mark.parametrize(("answer", "state"), [("is not enrolled", "no"), ("is already enrolled", "yes")])
def test_look_reads_secure_boot_and_whether_the_key_of_dkms_is_enrolled(tree, answer, state):
    variable = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    tree.tool("mokutil", f"echo $2 {answer}")
    tree.write(variable, b"\x06\x00\x00\x00\x00")
    assert tree.look().secure_boot == ""
    tree.write(variable, b"\x06\x00\x00\x00\x01")
    assert tree.look().secure_boot == state


def test_look_finds_missing_headers_held_packages_and_nouveau(tree):
    tree.tool("apt-cache", '[ "$2" = libc6 ] || exit 100')
    tree.tool("apt-mark", "echo libnvidia-compute-535; echo vim; echo nvidia-dkms-535")
    tree.write("proc/modules", "nouveau 2300000 1 - Live 0x0\n")
    found = tree.look()
    assert (found.headers, found.held) == ("missing", ("libnvidia-compute-535", "nvidia-dkms-535"))
    assert found.nouveau
    tree.tool("apt-cache", "exit 0")
    assert tree.look().headers == "available"
    tree.write("lib/modules/6.8.0-1/build/Makefile", "")
    assert tree.look().headers == "installed"


@pytest.mark.parametrize(
    ("cpu_list", "flags"),
    [
        ([HASWELL, HASWELL], "-march=x86-64-v3"),
        ([HASWELL, IVY_BRIDGE], "-march=x86-64-v2"),
        ([HASWELL, "fpu sse sse2"], "-march=x86-64"),
        (["", HASWELL], "-march=x86-64-v3"),
        ([""], ""),
    ],
)
def test_horovod_is_compiled_for_the_oldest_cpu(cpu_list, flags):
    assert cpus.arch_flags(frozenset(one.split()) for one in cpu_list) == flags
