"""Time each stage of the input pipeline on one core: read, parse, decode, augment, batch, copy to the device.

    stages CORES SECONDS LOCATION...

prints the rates of this machine as JSON. `bench data bench` on the controller calls measure() directly.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy
from numpy.typing import NDArray

from bench.worker import images, shards
from bench.worker.loader import Loader
from bench.worker.shards import Faults, Index, Pool, SampleOffsets

BATCH = 64
IMAGES = 256


@dataclass(frozen=True)
class Rate:
    """Work of a stage, with its wall-clock and CPU seconds."""

    stage: str
    images: int
    bytes: int
    seconds: float
    cpu_seconds: float
    cores: int = 1
    note: str = ""

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    @property
    def mb_per_second(self) -> float:
        return self.bytes / self.seconds / 1e6

    @property
    def images_per_core(self) -> float:
        return self.images / max(self.cpu_seconds, 1e-9)

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "images_per_second": self.images_per_second,
            "mb_per_second": self.mb_per_second,
            "images_per_second_per_core": self.images_per_core,
            "cores": self.cores,
            "note": self.note,
        }


def cpu_seconds(who: int = RUSAGE_SELF) -> float:
    used = getrusage(who)
    return used.ru_utime + used.ru_stime


def timed(stage: str, seconds: float, once: Callable[[], tuple[int, int]], note: str = "") -> Rate:
    """Repeat `once`, which returns the images and bytes it processed, for that many seconds."""
    once()
    done = size = 0
    begin, cpu = time.perf_counter(), cpu_seconds()
    while not done or time.perf_counter() - begin < seconds:
        n, b = once()
        done, size = done + n, size + b
    return Rate(stage, done, size, time.perf_counter() - begin, cpu_seconds() - cpu, 1, note)


def raw_read(index: Index) -> tuple[int, int]:
    """Read the first shard without parsing it."""
    shard = index.shards[0]
    buffer = memoryview(bytearray(shards.BLOCK))
    done = 0
    try:
        with shards.open_stream(index.location, shard.name, 0, shard.bytes) as stream:
            while got := stream.fill(buffer[: min(len(buffer), shard.bytes - done)]):
                done += got
    except OSError as error:
        raise shards.DataError(f"{index.location}/{shard.name}: {error.strerror or error}") from None
    return shard.samples, done


def read_and_parse(index: Index, offsets: SampleOffsets, pool: Pool) -> tuple[int, int]:
    shard = index.shards[0]
    found = 0
    faults = Faults(strict=True)
    for block in shards.blocks(index, shard, offsets, 0, shard.samples, pool, faults):
        found += len(block.samples)
        block.release(block.pending)
    return found, offsets.starts[-1]


def first_images(index: Index, limit: int = IMAGES) -> list[bytes]:
    shard = index.shards[0]
    offsets = shards.load_offsets(index, shard)
    found: list[bytes] = []
    for block in shards.blocks(index, shard, offsets, 0, min(limit, shard.samples), Pool(), Faults()):
        found += [bytes(sample[1]) for sample in block.samples]
        block.release(block.pending)
    return found


def storage(index: Index, seconds: float) -> list[Rate]:
    offsets = shards.load_offsets(index, index.shards[0])
    pool = Pool()
    return [
        timed("raw read", seconds, lambda: raw_read(index)),
        timed("read + tar parse", seconds, lambda: read_and_parse(index, offsets, pool)),
    ]


def processing(found: list[bytes], seconds: float) -> list[Rate]:
    """Stages after storage, on one core: the images are in memory."""
    size = sum(map(len, found))
    draw = random.Random(1)
    sizes = [images.size_of(jpeg) for jpeg in found]
    boxes = [images.crop_box(draw, *one) for one in sizes]
    work = list(zip(found, boxes, sizes, strict=True))
    crops = [images.crop(images.decode(jpeg, box, one, images.PIXELS), box, one).copy() for jpeg, box, one in work[:32]]
    batch = numpy.zeros((BATCH, images.PIXELS, images.PIXELS, 4), numpy.uint8)

    def decode() -> tuple[int, int]:
        for jpeg, box, one in work:
            images.decode(jpeg, box, one, images.PIXELS)
        return len(found), size

    def augment() -> tuple[int, int]:
        return len(crops), sum(images.resize(crop, images.PIXELS, True, batch[0]).nbytes for crop in crops)

    def whole() -> tuple[int, int]:
        for number, jpeg in enumerate(found):
            images.augment(jpeg, draw, images.PIXELS, batch[number % BATCH])
        return len(found), size

    return [
        timed("decode", seconds, decode),
        timed("augment", seconds, augment),
        timed("batch (decode + augment)", seconds, whole),
        to_device(batch, seconds),
    ]


def to_device(batch: NDArray[numpy.uint8], seconds: float) -> Rate:
    """Copy a batch to the GPU. Without a GPU, copy it in memory and say so in the note."""
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        pinned = torch.from_numpy(batch).pin_memory()

        def copy() -> tuple[int, int]:
            pinned.to("cuda", non_blocking=True)
            torch.cuda.synchronize()
            return len(batch), batch.nbytes

        return timed("host to device", seconds, copy)
    target = numpy.zeros_like(batch)

    def within() -> tuple[int, int]:
        target[...] = batch
        return len(batch), batch.nbytes

    return timed("host to device", seconds, within, "copy in memory, no GPU")


def pipeline(index: Index, cores: int, seconds: float) -> Rate:
    """The loader as the worker uses it."""
    batch = min(BATCH, index.samples)
    loader = Loader(index, 0, 1, batch, cores=cores)
    try:
        for _ in range(3):
            next(loader)
        before, begin, cpu = loader.meter.copy(), time.perf_counter(), cpu_seconds()
        done = 0
        while time.perf_counter() - begin < seconds:
            next(loader)
            done += batch
        spent, used = time.perf_counter() - begin, cpu_seconds() - cpu
        read = loader.meter.since(before)["read_bytes"]
    finally:
        loader.close()
    return Rate("pipeline", done, int(read), spent, used, cores)


def measure(locations: list[str], cores: int, seconds: float) -> dict[str, Any]:
    """Rates of all stages. Storage is timed per location; decoding, which does not depend on it, only once."""
    indexes = {location: shards.load_index(location) for location in locations}
    first = next(iter(indexes.values()))
    return {
        "cores": cores,
        "image_bytes": first.bytes / first.samples,
        "storage": {
            location: {
                "kind": "HTTP" if shards.is_url(location) else filesystem(Path(location)),
                "stages": [rate.as_json() for rate in storage(index, seconds)],
                "pipeline": pipeline(index, cores, seconds).as_json(),
            }
            for location, index in indexes.items()
        },
        "core": [rate.as_json() for rate in processing(first_images(first), seconds)],
    }


def filesystem(path: Path) -> str:
    """The filesystem type of a folder, which tells a local disk from a share."""
    best, kind = "", "disk"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    cores, seconds, *locations = argv
    try:
        print(json.dumps(measure(locations, int(cores), float(seconds))))
    except shards.DataError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
