"""Print the topology of this node: cores, NUMA nodes, the network card and the GPUs. Standard library only.

    topology SUBNET

Prints one JSON object. Traffic between a process and a network card on different NUMA nodes is slower.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.worker import fabric

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
    """The NUMA node from the kernel, else from hwloc (name: os=eth0 or pci=0000:3b:00.0); None if neither knows."""
    numa = text(device / "numa_node")
    if numa is None or int(numa) < 0:
        numa = output("hwloc-calc", "--intersect", "NUMAnode", name).partition(",")[0]
    return int(numa) if numa else None


def card(interface: str) -> dict[str, Any]:
    folder = SYS / "class/net" / interface
    speed = text(folder / "speed")
    driver = folder / "device/driver"
    return {
        "interface": interface,
        "mac": text(folder / "address"),
        "mtu": int(text(folder / "mtu") or 0),
        # A virtual interface has no bus driver; its link kind is used instead.
        "driver": driver.readlink().name if driver.exists() else link_kind(folder),
        "speed_mbit": int(speed) if speed and int(speed) > 0 else None,
        "numa": numa_of(folder / "device", f"os={interface}"),
        "adapters": fabric.adapters(interface, SYS / "class"),
    }


def link_kind(folder: Path) -> str:
    details = output("ip", "-json", "-details", "link", "show", folder.name)
    return str(json.loads(details)[0].get("linkinfo", {}).get("info_kind", "virtual")) if details else "virtual"


def kernel_name(bus: str) -> str:
    """nvidia-smi writes the PCI domain with eight digits, the kernel with four."""
    return bus.lower()[-12:]


def gpus() -> list[dict[str, Any]]:
    rows = []
    for line in output("nvidia-smi", "--query-gpu=pci.bus_id,name", "--format=csv,noheader").splitlines():
        bus, name = (part.strip() for part in line.split(",", 1))
        short = kernel_name(bus)
        rows.append({"bus": short, "name": name, "numa": numa_of(SYS / "bus/pci/devices" / short, f"pci={short}")})
    return rows


def main() -> None:
    numa_nodes = len(list((SYS / "devices/system/node").glob("node[0-9]*"))) or 1
    node = {"node": socket.gethostname(), "cores": len(os.sched_getaffinity(0)), "numa_nodes": numa_nodes}
    print(json.dumps({**node, "card": card(fabric.interface(sys.argv[1], fabric.addresses())), "gpus": gpus()}))
