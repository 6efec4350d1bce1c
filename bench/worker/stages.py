"""Time the stages a sample passes, each by itself, on one core: read, parse, decode, augment, batch, to the device.

    stages.py CORES SECONDS LOCATION...

prints what this machine can do as JSON; on the controller the same functions are called.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import numpy
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.worker import images, shards
from bench.worker.loader import Loader
from bench.worker.shards import Faults, Index, Places, Pool

BATCH = 64
IMAGES = 256


@dataclass(frozen=True)
class Rate:
    """What a stage did, in how many seconds of the clock and of a core."""

    stage: str
    images: int
    bytes: int
    seconds: float
    cpu: float
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
        return self.images / max(self.cpu, 1e-9)

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
    """Do something again and again for that long; it says how many images and bytes it went through."""
    once()
    done = size = 0
    begin, cpu = time.perf_counter(), cpu_seconds()
    while not done or time.perf_counter() - begin < seconds:
        n, b = once()
        done, size = done + n, size + b
    return Rate(stage, done, size, time.perf_counter() - begin, cpu_seconds() - cpu, 1, note)


def raw_read(index: Index) -> tuple[int, int]:
    """Every byte of the first shard, and nothing else."""
    shard = index.shards[0]
    buffer = memoryview(bytearray(shards.BLOCK))
    done = 0
    with shards.open_stream(index.location, shard.name, 0, shard.bytes) as stream:
        while done < shard.bytes:
            got = stream.fill(buffer[: min(len(buffer), shard.bytes - done)])
            if not got:
                break
            done += got
    return shard.samples, done


def read_and_parse(index: Index, places: Places, pool: Pool) -> tuple[int, int]:
    shard = index.shards[0]
    found = 0
    faults = Faults(strict=True)
    for block in shards.blocks(index, shard, places, 0, shard.samples, pool, faults):
        found += len(block.samples)
        block.release(block.left)
    return found, places.starts[-1]


def some_images(index: Index, most: int = IMAGES) -> list[bytes]:
    shard = index.shards[0]
    places = shards.load_places(index, shard)
    found: list[bytes] = []
    for block in shards.blocks(index, shard, places, 0, min(most, shard.samples), Pool(), Faults()):
        found += [bytes(sample[1]) for sample in block.samples]
        block.release(block.left)
    return found


def storage(index: Index, seconds: float) -> list[Rate]:
    places = shards.load_places(index, index.shards[0])
    pool = Pool()
    return [
        timed("raw read", seconds, lambda: raw_read(index)),
        timed("read + tar parse", seconds, lambda: read_and_parse(index, places, pool)),
    ]


def processing(found: list[bytes], seconds: float) -> list[Rate]:
    """One core, no storage: the images are in memory."""
    size = sum(map(len, found))
    draw = random.Random(1)
    sizes = [images.size_of(jpeg) for jpeg in found]
    boxes = [images.crop_box(draw, *one) for one in sizes]
    decoded = [
        images.decode(jpeg, box, one, images.PIXELS).copy() for jpeg, box, one in zip(found, boxes, sizes, strict=True)
    ][:32]
    batch = numpy.zeros((BATCH, images.PIXELS, images.PIXELS, 4), numpy.uint8)

    def decode() -> tuple[int, int]:
        for jpeg, box, one in zip(found, boxes, sizes, strict=True):
            images.decode(jpeg, box, one, images.PIXELS)
        return len(found), size

    def augment() -> tuple[int, int]:
        done = 0
        for image, box, one in zip(decoded, boxes, sizes, strict=False):
            x, y = image.shape[1] / one[0], image.shape[0] / one[1]
            scaled = (box[0] * x, box[1] * y, box[2] * x, box[3] * y)
            done += images.resample(image, scaled, images.PIXELS, True, batch[0]).nbytes
        return len(decoded), done

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
    """A batch to the GPU, or where there is none within memory, and then it says so."""
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

    return timed("host to device", seconds, within, "a copy in memory: there is no GPU here")


def pipeline(index: Index, cores: int, seconds: float) -> Rate:
    """The loader as the worker uses it, on so many cores."""
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


def cat(path: Path) -> tuple[float, float]:
    """Seconds of clock and CPU of `cat FILE > /dev/null`."""
    begin, cpu = time.perf_counter(), cpu_seconds(RUSAGE_CHILDREN)
    subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin, cpu_seconds(RUSAGE_CHILDREN) - cpu


def usual_batches(files: list[tuple[Path, int]], draw: random.Random) -> Iterator[tuple[Any, Any]]:
    """What most training scripts do, for comparison: a file per image, Pillow, and a batch put together at the end."""
    for begin in range(0, len(files), BATCH):
        some = files[begin : begin + BATCH]
        rows = [images.usual(path.read_bytes(), draw) for path, _ in some]
        yield numpy.stack(rows), numpy.array([label for _, label in some])


def unpack(index: Index, folder: Path, most: int) -> list[tuple[Path, int]]:
    """The same images as single files."""
    out = []
    for number, jpeg in enumerate(some_images(index, most)):
        path = folder / f"{number:06d}.jpg"
        with suppress(FileExistsError):
            path.write_bytes(jpeg)
        out.append((path, number % index.classes))
    return out


def measure(locations: list[str], cores: int, seconds: float) -> dict[str, Any]:
    """Every stage of every storage backend; decoding does not depend on where the images came from."""
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
        "core": [rate.as_json() for rate in processing(some_images(first), seconds)],
    }


def filesystem(path: Path) -> str:
    """The type of filesystem a folder is on: it tells a local disk from a share."""
    best, kind = "", "disk"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def main() -> int:
    cores, seconds, *locations = sys.argv[1:]
    try:
        print(json.dumps(measure(locations, int(cores), float(seconds))))
    except shards.DataError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
