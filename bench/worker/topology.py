"""Run on a node: what lies between a process and the fabric. Standard library only.

    topology INTERFACE

Prints one JSON object: cores and NUMA nodes, the interface's driver, speed and NUMA node, and the same of every GPU. A
process on another NUMA node than its card pays for the way between them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

SYS = Path("/sys")


def text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def output(*argv: str) -> str:
    if not shutil.which(argv[0]):
        return ""
    done = subprocess.run(argv, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def numa_of(device: Path, name: str) -> int | None:
    """The kernel's word, or hwloc's where the kernel does not know; None where neither does."""
    found = text(device / "numa_node")
    if found is None or int(found) < 0:
        # hwloc knows interfaces by name and other devices by the bus
        found = output("hwloc-calc", "--intersect", "NUMAnode", name).partition(",")[0]
    return int(found) if found else None


def card(interface: str) -> dict[str, Any]:
    folder = SYS / "class/net" / interface
    speed = text(folder / "speed")
    driver = folder / "device/driver"
    return {
        "interface": interface,
        "mac": text(folder / "address"),
        "mtu": int(text(folder / "mtu") or 0),
        # Virtual interfaces have no driver of a bus; their kind is the best there is.
        "driver": driver.readlink().name if driver.exists() else kind(folder),
        "speed_mbit": int(speed) if speed and int(speed) > 0 else None,
        "numa": numa_of(folder / "device", f"os={interface}"),
    }


def kind(folder: Path) -> str:
    found = output("ip", "-json", "-details", "link", "show", folder.name)
    return str(json.loads(found)[0].get("linkinfo", {}).get("info_kind", "virtual")) if found else "virtual"


def gpus() -> list[dict[str, Any]]:
    found = []
    for line in output("nvidia-smi", "--query-gpu=pci.bus_id,name", "--format=csv,noheader").splitlines():
        bus, name = (part.strip() for part in line.split(",", 1))
        # nvidia-smi writes the domain with eight digits, the kernel with four
        short = bus.lower()[-12:]
        found.append({"bus": short, "name": name, "numa": numa_of(SYS / "bus/pci/devices" / short, f"pci={short}")})
    return found


def main() -> None:
    memories = len(list((SYS / "devices/system/node").glob("node[0-9]*"))) or 1
    found = {"node": socket.gethostname(), "cores": len(os.sched_getaffinity(0)), "numa_nodes": memories}
    print(json.dumps({**found, "card": card(sys.argv[1]), "gpus": gpus()}))
