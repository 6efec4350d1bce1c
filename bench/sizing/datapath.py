"""Drives, cores and network interfaces that a number of GPUs needs, or how busy given ones keep the GPUs.

Data flows storage -> (network) -> cores, which decode -> GPU. The slowest part limits the flow, so each part
needs enough units for the input rate of the GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, replace

from bench.catalogue import interconnect, models
from bench.parse import counts
from bench.predict.inputs import single_step
from bench.sizing import components
from bench.sizing.components import Speeds
from cluster.core.errors import UserError
from cluster.core.numbers import COUNT
from cluster.core.tables import columns

# Storage -> (the drive, whether reads are random by default, whether a network is in between).
STORAGE = {
    "ssd": ("ssd", False, False),
    "hdd": ("hdd", False, False),
    # Many clients that read single files make a server's disks seek.
    "nfs": ("hdd", True, True),
    # Whole shards are read from start to end.
    "object": ("hdd", False, True),
}
BYTES_PER_PIXEL = 3 * 4
# Tolerance for rounding errors in sums of decimal speeds.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Need:
    """What a number of GPUs needs to be busy all the time."""

    gpus: int
    drives: int
    cores: int
    nics: int
    storage_gbytes: float
    gpu_gbytes: float


@dataclass(frozen=True)
class Flow:
    """What given parts deliver: the smallest capacity along the path (its minimum cut)."""

    gpus: int
    gpu_use: float
    bottleneck: str
    capacity_gpus: dict[str, float]


def gpu_feed(speeds: Speeds) -> float:
    """GB/s of decoded data per GPU: limited by compute or by its input."""
    return min(speeds.gpu_compute, speeds.gpu_in)


def stored_per_decoded(speeds: Speeds, compressed: bool) -> float:
    return speeds.core_in / speeds.core_out if compressed else 1.0


def drive_speed(speeds: Speeds, storage: str, access: str | None = None) -> float:
    drive, random, _ = STORAGE[storage]
    if drive == "ssd":
        return speeds.ssd
    seeks = random if access is None else access == "random"
    return speeds.hdd_random if seeks else speeds.hdd_sequential


def need(gpus: int, storage: str, speeds: Speeds, compressed: bool = True, access: str | None = None) -> Need:
    feed = gpus * gpu_feed(speeds)
    stored = feed * stored_per_decoded(speeds, compressed)
    return Need(
        gpus=gpus,
        drives=_whole(stored / drive_speed(speeds, storage, access)),
        cores=_whole(feed / speeds.core_out),
        nics=_whole(stored / speeds.nic) if STORAGE[storage][2] else 0,
        storage_gbytes=stored,
        gpu_gbytes=feed,
    )


def flow(
    gpus: int, storage: str, speeds: Speeds, have: dict[str, int], compressed: bool = True, access: str | None = None
) -> Flow:
    """How busy the GPUs are with the parts in `have`. Other parts are taken as sufficient."""
    feed = gpu_feed(speeds)
    stored = feed * stored_per_decoded(speeds, compressed)
    capacity = {"gpus": float(gpus)}
    if "drives" in have:
        capacity["drives"] = have["drives"] * drive_speed(speeds, storage, access) / stored
    if "cores" in have:
        capacity["cores"] = have["cores"] * speeds.core_out / feed
    if "nics" in have and STORAGE[storage][2]:
        capacity["nics"] = have["nics"] * speeds.nic / stored
    bottleneck = min(capacity, key=lambda part: capacity[part])
    return Flow(gpus, capacity[bottleneck] / gpus, bottleneck, capacity)


def _whole(units: float) -> int:
    return max(1, math.ceil(units - ROUNDING))


def speeds_of(args: argparse.Namespace) -> tuple[Speeds, str]:
    """The components' speeds, and where the speed of a GPU comes from: as for `bench predict`, if a GPU is given."""
    speeds = components.from_arguments(args.speed)
    if args.gpu is None and args.single_rate is None:
        return speeds, ""
    network = models.get(args.model)
    if network.tokens:
        raise UserError(f"--model: {args.model} reads words; only the path of images has a size here")
    step, source, _ = single_step(args.model, args.batch, args.gpu, args.precision, args.single_rate)
    rate, pixels = 1000 * args.batch / step, network.input_pixels
    given = {word.partition("=")[0].strip().replace("-", "_") for word in args.speed}
    usual = {"gpu_compute": rate * BYTES_PER_PIXEL * pixels**2 / 1e9, "gpu_in": interconnect.PCIE_IN_GBYTES}
    speeds = replace(speeds, **{name: value for name, value in usual.items() if name not in given})
    return speeds, f"one GPU: {rate:.1f} images/s of {pixels} x {pixels} pixels in single precision ({source})"


def configure(parser: argparse.ArgumentParser) -> None:
    components.add_compute_arguments(parser)
    parser.add_argument("--batch", type=COUNT, default=64, help="images per GPU and step (default 64)")
    parser.add_argument("--gpus", default="1,4,8,16,64,256", help="GPUs, or a list (default 1,4,8,16,64,256)")
    parser.add_argument("--storage", choices=tuple(STORAGE), default="ssd", help="(default ssd)")
    parser.add_argument("--access", choices=("sequential", "random"), help="access to hard disks (default: nfs random)")
    parser.add_argument("--uncompressed", action="store_true", help="the data is stored decoded")
    parser.add_argument("--drives", type=COUNT, help="available drives; shows how busy they keep the GPUs")
    parser.add_argument("--cores", type=COUNT, help="available cores")
    parser.add_argument("--nics", type=COUNT, help="available network interfaces")
    components.add_argument(parser)


def run(args: argparse.Namespace) -> int:
    speeds, source = speeds_of(args)
    have = {part: getattr(args, part) for part in ("drives", "cores", "nics") if getattr(args, part) is not None}
    sizes = counts(args.gpus, "--gpus")
    compressed = not args.uncompressed
    needs = [need(gpus, args.storage, speeds, compressed, args.access) for gpus in sizes]
    flows = [flow(gpus, args.storage, speeds, have, compressed, args.access) for gpus in sizes] if have else []
    drive = drive_speed(speeds, args.storage, args.access)
    ratio = stored_per_decoded(speeds, compressed)
    if args.json:
        answer = {
            "storage": args.storage,
            "compressed": compressed,
            "speeds_gbytes": asdict(speeds),
            "drive_gbytes": drive,
            "stored_per_decoded": ratio,
            "needs": [asdict(found) for found in needs],
            "have": have,
            "flows": [asdict(found) for found in flows],
        }
        print(json.dumps(answer, indent=2))
        return 0
    print(f"speeds, GB/s: {speeds.as_text()}")
    print(source or "the speed of a GPU is a default; give --gpu or --single-rate for what `bench predict` counts with")
    feed = gpu_feed(speeds)
    print(f"per GPU: {feed:g} GB/s decoded = {feed * ratio:g} GB/s from drives of {drive:g} GB/s")
    print("units = ceil(GPUs x GB/s per GPU / GB/s per unit)\n")
    head = ("gpus", "drives", "cores", "nics", "GB/s from storage", "GB/s into GPUs")
    cells = []
    for one in needs:
        nics = one.nics if STORAGE[args.storage][2] else "-"
        cells.append((one.gpus, one.drives, one.cores, nics, f"{one.storage_gbytes:.3g}", f"{one.gpu_gbytes:.3g}"))
    print(columns(head, cells))
    if flows:
        print("\nwith " + ", ".join(f"{number} {part}" for part, number in have.items()))
        uses = [(one.gpus, f"{one.gpu_use:.1%}", one.bottleneck) for one in flows]
        print(columns(("gpus", "GPU use", "limited by"), uses))
    return 0
