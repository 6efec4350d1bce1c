"""Check the speed of the data path, on one core and on the same images as its baselines.

Goals: decoding at least 1.5 times as fast as the usual pipeline, reading at least 90% as fast as cat. Every repetition
compares both sides, and the median of these ratios must meet the goal, in wall-clock or in CPU time. Other programs
disturb the wall clock but hardly the CPU time.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from resource import RUSAGE_CHILDREN

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/unit")]

import numpy  # noqa: E402
from data_cases import pillow_pipeline  # noqa: E402

from bench.cli import main as bench  # noqa: E402
from bench.worker import images, shards, stages  # noqa: E402
from bench.worker.shards import Faults, Pool  # noqa: E402

REPEATS = int(os.environ.get("REPEATS", "9"))
IMAGES = int(os.environ.get("IMAGES", "4000"))
DECODED = 512
SPEEDUP = 1.5
READING = 0.9


def timed(work) -> tuple[float, float]:
    begin, cpu = time.perf_counter(), stages.cpu_seconds()
    work()
    return time.perf_counter() - begin, stages.cpu_seconds() - cpu


def sharded(index, offsets, pool, limit: int, planes) -> int:
    """From shard to normalised batch on one core: the same result as the usual pipeline."""
    draw = random.Random(1)
    row = numpy.zeros((images.PIXELS, images.PIXELS, 4), numpy.uint8)
    done = 0
    for block in shards.blocks(index, index.shards[0], offsets, 0, limit, pool, Faults(strict=True)):
        for sample in block.samples:
            images.augment(sample[1], draw, images.PIXELS, row)
            images.normalise(row, planes[done % stages.BATCH])
            done += 1
        block.release(block.pending)
    return done


def sharded_bytes(index, offsets, pool, limit: int, rows) -> int:
    """The same without normalisation, which a GPU does itself."""
    draw = random.Random(1)
    done = 0
    for block in shards.blocks(index, index.shards[0], offsets, 0, limit, pool, Faults(strict=True)):
        for sample in block.samples:
            images.augment(sample[1], draw, images.PIXELS, rows[done % stages.BATCH])
            done += 1
        block.release(block.pending)
    return done


def usual_batches(files: list[Path], draw: random.Random) -> None:
    """One file per image, decoded with Pillow, and a batch stacked at the end."""
    for begin in range(0, len(files), stages.BATCH):
        numpy.stack([pillow_pipeline(path.read_bytes(), draw) for path in files[begin : begin + stages.BATCH]])


def cat(path: Path) -> tuple[float, float]:
    """Wall-clock and CPU seconds of `cat FILE > /dev/null`."""
    begin, cpu = time.perf_counter(), stages.cpu_seconds(RUSAGE_CHILDREN)
    subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin, stages.cpu_seconds(RUSAGE_CHILDREN) - cpu


def main() -> int:
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        bench(["data", "make", "--images", str(IMAGES), "--out", str(folder / "set"), "--shard-mb", "1000"])
        index = shards.load_index(str(folder / "set"))
        shard = index.shards[0]
        offsets = shards.load_offsets(index, shard)
        pool = Pool()
        files = []
        for number, jpeg in enumerate(stages.first_images(index, DECODED)):
            files.append(folder / f"{number:06d}.jpg")
            files[-1].write_bytes(jpeg)
        planes = numpy.zeros((stages.BATCH, 3, images.PIXELS, images.PIXELS), numpy.float32)
        rows = numpy.zeros((stages.BATCH, images.PIXELS, images.PIXELS, 4), numpy.uint8)
        limit = len(files)
        work = {
            "usual: files, Pillow, to tensor": lambda: usual_batches(files, random.Random(1)),
            "shards, normalised": lambda: sharded(index, offsets, pool, limit, planes),
            "shards, bytes for the GPU": lambda: sharded_bytes(index, offsets, pool, limit, rows),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in [*work, "cat", "read + parse"]}
        for _ in range(REPEATS):
            for name, job in work.items():
                times[name].append(timed(job))
        for _ in range(3 * REPEATS):
            times["cat"].append(cat(folder / "set" / shard.name))
            times["read + parse"].append(timed(lambda: stages.read_and_parse(index, offsets, pool)))
    size = sum(offsets.starts[n + 1] - offsets.starts[n] for n in range(limit))
    print(f"\n{'one core':34}{'images/s':>10}{'MB/s':>9}{'of CPU time':>14}")
    for name in work:
        clock, cpu = (statistics.median(part) for part in zip(*times[name], strict=True))
        print(f"{name:34}{limit / clock:10.0f}{size / clock / 1e6:9.0f}{limit / cpu:10.0f}/s")
    for name in ("cat", "read + parse"):
        clock, cpu = (statistics.median(part) for part in zip(*times[name], strict=True))
        print(f"{name:34}{shard.samples / clock:10.0f}{shard.bytes / clock / 1e6:9.0f}{shard.samples / cpu:10.0f}/s")

    def ratio(base: str, other: str, part: int) -> float:
        return statistics.median(a[part] / b[part] for a, b in zip(times[base], times[other], strict=True))

    usual = next(iter(work))
    ok = True
    for title, base, other, goal in (
        ("bytes, against the usual pipeline", usual, "shards, bytes for the GPU", SPEEDUP),
        ("normalised on the CPU too, against the usual pipeline", usual, "shards, normalised", SPEEDUP),
        ("read + parse, against cat", "cat", "read + parse", READING),
    ):
        clock, cpu = ratio(base, other, 0), ratio(base, other, 1)
        met = max(clock, cpu) >= goal
        ok = ok and met
        print(
            f"{title}: x{clock:.2f} by the clock, x{cpu:.2f} in CPU time (goal {goal}): {'met' if met else 'NOT MET'}"
        )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
