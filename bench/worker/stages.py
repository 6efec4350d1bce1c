"""Time each stage of the input pipeline on one core: read, parse, decode, augment, batch, copy to the device.

    stages CORES SECONDS LOCATION...

prints the rates of this machine as JSON. `bench data bench` on the controller calls measure() directly.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy
from numpy.typing import NDArray

from bench.worker import accelerator, images, shards
from bench.worker.loader import Loader
from bench.worker.shards import Faults, Index, Pool, SampleOffsets

BATCH = 64
IMAGES = 256


Rate = dict[str, Any]


def rate(stage: str, count: int, size: float, seconds: float, cpu: float, cores: int = 1, note: str = "") -> Rate:
    """The rates of a stage from its images, bytes, wall-clock and CPU seconds."""
    return {
        "stage": stage,
        "images_per_second": count / seconds,
        "mb_per_second": size / seconds / 1e6,
        "images_per_second_per_core": count / max(cpu, 1e-9),
        "cores": cores,
        "note": note,
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
    return rate(stage, done, size, time.perf_counter() - begin, cpu_seconds() - cpu, note=note)


def raw_read(index: Index) -> tuple[int, int]:
    """Read the first shard without parsing it."""
    shard = index.shards[0]
    buffer = memoryview(bytearray(shards.BLOCK))
    done = 0
    try:
        with closing(shards.open_stream(index.location, shard.name, 0, shard.bytes)) as stream:
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
    cuda = accelerator.present()
    device = accelerator.make(cuda, 0)
    source: Any = batch
    if cuda:
        import torch

        source = torch.from_numpy(batch).pin_memory()
    target = numpy.zeros_like(batch)

    def copy() -> tuple[int, int]:
        if cuda:
            source.to(device.place, non_blocking=True)
            device.wait(device.mark())
        else:
            target[...] = source
        return len(batch), batch.nbytes

    return timed("host to device", seconds, copy, "" if cuda else "copy in memory, no GPU")


def pipeline(index: Index, cores: int, seconds: float) -> Rate:
    """The loader as the worker uses it."""
    batch = min(BATCH, index.samples)
    with closing(Loader(index, 0, 1, batch, cores=cores)) as loader:
        for _ in range(3):
            next(loader)
        before, begin, cpu = replace(loader.meter), time.perf_counter(), cpu_seconds()
        done = 0
        while time.perf_counter() - begin < seconds:
            next(loader)
            done += batch
        spent, used = time.perf_counter() - begin, cpu_seconds() - cpu
        read = loader.meter.since(before)["read_bytes"]
    return rate("pipeline", done, read, spent, used, cores)


def measure(locations: list[str], cores: int, seconds: float, show: Callable[[str], None]) -> dict[str, Any]:
    """Rates of all stages. Storage is timed per location; decoding, which does not depend on it, only once.

    show gets the name of each stage when it starts.
    """
    indexes = {location: shards.load_index(location) for location in locations}
    first = next(iter(indexes.values()))
    backends: dict[str, Any] = {}
    for location, index in indexes.items():
        kind = "HTTP" if shards.is_url(location) else filesystem(Path(location))
        show(f"{location}: read and parse")
        stages = storage(index, seconds)
        show(f"{location}: the whole pipeline on {cores} cores")
        backends[location] = {"kind": kind, "stages": stages, "pipeline": pipeline(index, cores, seconds)}
    show("decode, augment and copy on one core")
    core = processing(first_images(first), seconds)
    return {"cores": cores, "image_bytes": first.bytes / first.samples, "storage": backends, "core": core}


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
        found = measure(locations, int(cores), float(seconds), lambda text: print(text, file=sys.stderr, flush=True))
        print(json.dumps(found))
    except shards.DataError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
