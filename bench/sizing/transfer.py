"""How long a data set takes to copy over each component."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from bench.parse import number, numbers, share
from bench.sizing import components
from bench.sizing.components import Speeds
from cluster.core.tables import columns

# Share of a network's rate that a copy of many files reaches.
NETWORK_EFFICIENCY = 0.7
NETWORKS_GBPS = (1.0, 10.0, 25.0, 40.0, 100.0)


@dataclass(frozen=True)
class Transfer:
    component: str
    gbytes_per_second: float
    efficiency: float
    seconds: float


def transfers(
    terabytes: float, speeds: Speeds, networks_gbps: tuple[float, ...] = NETWORKS_GBPS, efficiency: float = 0.7
) -> list[Transfer]:
    """Seconds = bytes / (speed x efficiency); drives and cores reach their full speed, networks do not."""
    parts = [
        ("SSD", speeds.ssd, 1.0),
        ("HDD sequential", speeds.hdd_sequential, 1.0),
        ("HDD random", speeds.hdd_random, 1.0),
        ("core, decoding", speeds.core_in, 1.0),
        ("GPU input", speeds.gpu_in, 1.0),
        *((f"{rate:g} GbE", rate / 8, efficiency) for rate in networks_gbps),
        ("NIC", speeds.nic, efficiency),
    ]
    return [Transfer(name, speed, part, 1000 * terabytes / (speed * part)) for name, speed, part in parts]


def readable(seconds: float) -> str:
    """A duration in its natural unit."""
    day = 86400
    for unit, length in (("years", 365.25 * day), ("weeks", 7 * day), ("days", day), ("hours", 3600), ("min", 60)):
        if seconds >= (13 * day if unit == "weeks" else length):
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset-tb", default="1000", help="size in TB (default 1000, a petabyte)")
    parser.add_argument("--rate-gbps", help="networks to compare, Gbit/s (default 1,10,25,40,100)")
    text = f"share of a network's rate that a copy reaches (default {NETWORK_EFFICIENCY})"
    parser.add_argument("--efficiency", default=str(NETWORK_EFFICIENCY), help=text)
    components.add_argument(parser)


def run(args: argparse.Namespace) -> int:
    speeds = components.from_arguments(args.speed)
    size = number(args.dataset_tb, "--dataset-tb")
    efficiency = share(args.efficiency, "--efficiency")
    networks = tuple(numbers(args.rate_gbps, "--rate-gbps")) if args.rate_gbps else NETWORKS_GBPS
    found = transfers(size, speeds, networks, efficiency)
    if args.json:
        rows = [{**asdict(one), "readable": readable(one.seconds)} for one in found]
        print(json.dumps({"dataset_tb": size, "efficiency": efficiency, "transfers": rows}, indent=2))
        return 0
    print(f"{size:g} TB; time = size / (GB/s x efficiency)\n")
    cells = []
    for one in found:
        times = readable(one.seconds), readable(one.seconds * one.efficiency)
        cells.append((one.component, f"{one.gbytes_per_second:g}", f"{one.efficiency:g}", *times))
    print(columns(("component", "GB/s", "efficiency", "time", "at full rate"), cells))
    return 0
