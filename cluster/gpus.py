"""Which CUDA stack, kernel module and driver GPUs need: decided from PCI ids, before anything is changed.

roles/nvidia_driver/files/gpus.yml has the table; look.sh beside it prints what `parse` reads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from cluster.core import files
from cluster.core.config import ROOT, versions
from cluster.core.errors import UserError

FILES = ROOT / "roles/nvidia_driver/files"
TABLE = "roles/nvidia_driver/files/gpus.yml"
# For clusters without GPUs, and for models that the table does not name.
NEWEST = "13"


@dataclass(frozen=True)
class Generation:
    name: str
    pci: tuple[tuple[int, int], ...]
    models: frozenset[str]
    since: float
    driver: int
    modules: tuple[str, ...]
    stacks: tuple[str, ...]


@dataclass(frozen=True)
class Stack:
    """cuda: the release that torch is built for. driver: the oldest one that runs it."""

    cuda: str
    driver: str


@dataclass(frozen=True)
class Machine:
    """What look.sh found on a node."""

    name: str
    system: str = ""
    release: str = ""
    kernel: str = ""
    cpu: frozenset[str] = frozenset()
    # PCI device ids
    gpus: tuple[str, ...] = ()
    switches: int = 0
    # Version of the kernel module; compute capability of each GPU that answers.
    loaded: str = ""
    capabilities: tuple[float, ...] = ()
    nouveau: bool = False
    # "": off. Otherwise whether the key that DKMS signs with is enrolled.
    secure_boot: str = ""
    # installed, available, missing, or "" if the machine has no package lists
    headers: str = ""
    held: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        """Whether every GPU answers to a driver that is there."""
        return bool(self.loaded) and bool(self.gpus) and len(self.capabilities) >= len(self.gpus)


@cache
def generations() -> tuple[Generation, ...]:
    return tuple(
        Generation(
            name,
            tuple(block(text) for text in one["pci"]),
            frozenset(one["models"]),
            *(one["since"], one["driver"], tuple(one["modules"]), tuple(one["stacks"])),
        )
        for name, one in files.mapping(FILES / "gpus.yml")["generations"].items()
    )


def block(text: str) -> tuple[int, int]:
    first, last = text.split("-")
    return int(first, 16), int(last, 16)


@cache
def stacks() -> dict[str, Stack]:
    return {name: Stack(**one) for name, one in files.mapping(FILES / "gpus.yml")["stacks"].items()}


def of_id(device: str) -> Generation | None:
    """The generation of a PCI device id, such as 1db4."""
    number = int(device, 16)
    return next((one for one in generations() if any(low <= number <= high for low, high in one.pci)), None)


def of_capability(value: float) -> Generation | None:
    return next((one for one in reversed(generations()) if one.since <= value), None)


def expected(models: Iterable[str]) -> str:
    """The stack for the models of cluster.yml, before there are machines to ask."""
    wanted = {re.sub(r"[ _]", "", model.lower()) for model in models}
    known = [one for one in generations() if one.models & wanted]
    return next((name for name in stacks() if all(name in one.stacks for one in known)), NEWEST)


def parse(name: str, text: str) -> Machine:
    """The output of look.sh."""
    facts: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        facts.setdefault(key, []).append(value)

    def first(key: str) -> str:
        return facts.get(key, [""])[0]

    system, _, release = first("release").partition(" ")
    return Machine(
        name=name,
        system=system,
        release=release,
        kernel=first("kernel"),
        cpu=frozenset(first("cpu").split()),
        gpus=tuple(facts.get("gpu", ())),
        switches=len(facts.get("switch", ())),
        loaded=first("loaded"),
        capabilities=tuple(map(float, facts.get("capability", ()))),
        nouveau="nouveau" in facts,
        secure_boot=first("secureboot"),
        headers=first("headers"),
        held=tuple(facts.get("held", ())),
    )


def known(machine: Machine) -> list[Generation]:
    """The generation of each GPU. One that the table lacks is known if a driver tells its compute capability."""
    found = [of_id(device) for device in machine.gpus]
    if None in found and machine.works:
        found = [of_capability(value) for value in machine.capabilities]
    for device, one in zip(machine.gpus, found, strict=False):
        if one is None:
            raise UserError(
                f"{machine.name}: GPU 10de:{device} is not in {TABLE}; add its block of ids, or install a driver that "
                "runs it yourself"
            )
    return [one for one in found if one]


def stack_for(machines: Iterable[Machine]) -> str:
    """The stack that serves all GPUs of all machines, the newest one first."""
    found = {machine.name: known(machine) for machine in machines if machine.gpus}
    for name, ones in found.items():
        for one in ones:
            if not one.stacks:
                raise UserError(
                    f"{name}: {one.name.title()} GPUs are too old: their last driver is {one.driver}, which runs "
                    "neither CUDA 13.0 nor 12.6; declare no GPUs for this node, or leave it out of cluster.yml"
                )
    for stack in stacks():
        if all(stack in one.stacks for ones in found.values() for one in ones):
            return stack
    sole = {one.stacks[0]: (name, one) for name, ones in found.items() for one in ones if len(one.stacks) == 1}
    texts = [f"{name} has {one.name.title()} (only CUDA {stacks()[stack].cuda})" for stack, (name, one) in sole.items()]
    raise UserError(f"{' and '.join(texts)}: no CUDA version supports both; leave one of them out of cluster.yml")


def module_for(machine: Machine) -> str:
    """The kernel module that drives all GPUs of the machine."""
    found = known(machine)
    for module in ("open", "proprietary"):
        if all(module in one.modules for one in found):
            return module
    names = " and ".join(sorted({one.name.title() for one in found}))
    raise UserError(f"{machine.name}: no kernel module drives {names} GPUs in one machine; remove one kind")


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def branch() -> int:
    """The driver branch that is installed. It is the last one that supports GPUs before Turing."""
    return number(versions()["nvidia_driver"])[0]


def keeps(machine: Machine, stack: str) -> bool:
    """Whether the driver of the machine stays."""
    return machine.works and number(machine.loaded) >= number(stacks()[stack].driver)


def obstacle(machine: Machine, stack: str) -> str:
    """Why a driver that must be installed could not be; "" if it can."""
    if not machine.gpus or keeps(machine, stack):
        return ""
    if machine.held:
        names = " ".join(machine.held)
        return f"the packages {names} are held, so the driver cannot change; run apt-mark unhold {names}"
    if machine.secure_boot == "no":
        return (
            "Secure Boot is on, and the kernel refuses a module that is compiled here; turn it off in the firmware, or "
            "enroll the key of DKMS (apt-get install dkms mokutil; mokutil --import /var/lib/dkms/mok.pub; reboot)"
        )
    if machine.headers == "missing":
        headers = f"linux-headers-{machine.kernel}"
        return f"apt has no {headers}, without which no driver compiles; run apt-get update, or boot another kernel"
    return ""


def summary(machine: Machine, stack: str) -> str:
    """One line: what the machine has and what it gets."""
    pairs = zip(known(machine), machine.gpus, strict=False)
    names = Counter(f"{one.name.title()} (10de:{device})" for one, device in pairs)
    devices = ", ".join(f"{count} x {name}" for name, count in names.items())
    switches = f", {machine.switches} x NVSwitch" if machine.switches else ""
    if keeps(machine, stack):
        driver = f"driver {machine.loaded} works and stays"
    else:
        driver = f"driver {branch()} with the {module_for(machine)} kernel module" + (
            f" instead of {machine.loaded}" if machine.loaded else ""
        )
        driver += "; nouveau is in use, so a reboot is required" if machine.nouveau else ""
    return f"{machine.name}: {devices}{switches}: CUDA {stacks()[stack].cuda}, {driver}"


def choice(name: str, text: str, stack: str = "", headers: Iterable[str] = ()) -> dict[str, Any]:
    """For roles/nvidia_driver: what to do on a node with this output of look.sh.

    stack is the cluster's. headers are the packages that are installed if they are not those of the running kernel.
    """
    machine = parse(name, text)
    if set(headers) - {f"linux-headers-{machine.kernel}"}:
        machine = replace(machine, headers="")
    found: dict[str, Any] = {"gpus": len(machine.gpus), "switches": machine.switches, "module": "open", "keep": False}
    found |= {"only_open": any(one.modules == ("open",) for one in map(of_id, machine.gpus) if one)}
    found |= {"minimum": stacks()[stack or NEWEST].driver, "summary": "", "problem": ""}
    if not machine.gpus:
        return found
    try:
        own = stack_for([machine])
        used = stack or own
        if any(used not in one.stacks for one in known(machine)):
            raise UserError(
                f"{name}: CUDA {stacks()[used].cuda} does not support its GPUs; set cuda_stack to {own} for all nodes"
            )
        module, keep, why = module_for(machine), keeps(machine, used), obstacle(machine, used)
    except UserError as error:
        return found | {"problem": str(error)}
    found |= {"module": module, "keep": keep, "minimum": stacks()[used].driver, "summary": summary(machine, used)}
    return found | {"problem": f"{name}: {why}" if why else ""}
