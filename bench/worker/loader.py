"""Prepare batches of decoded images for one rank while the device computes.

One thread reads windows of samples, `cores` threads decode them into the rows of the next batches, and the device takes
finished batches in order. Memory does not depend on the size of a shard (see `bound`): three windows of compressed
samples (one being read, one waiting, one being decoded) and AHEAD + 1 batches of pixels.
"""

import os
import queue
import random
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import numpy
from numpy.typing import NDArray

from bench.worker import images, shards, streams
from bench.worker.sample_order import Policy, SampleOrder, Window
from bench.worker.shards import Block, DataError, Faults, Index, Pool, Sample

if TYPE_CHECKING:
    # Ubuntu 22.04's Python 3.10 lacks it.
    from typing import Self

# Finished batches that may wait for the device.
AHEAD = 2
WINDOW = 512
# Must be longer than a stream retries its server.
BATCH_TIMEOUT = 120.0
POLL = 0.2
# The run stops after this many batches without a readable sample.
UNREADABLE_BATCHES = 20
Slot = tuple[Sample, Block] | None
T = TypeVar("T")


class Closed(Exception):
    """The loader was closed; its threads end."""


@dataclass
class Batch:
    """Images of one step. A row that is not valid repeats another one: padding, or a damaged sample."""

    pixels: NDArray[Any]
    labels: NDArray[numpy.int64]
    valid: NDArray[numpy.bool_]
    keys: list[str]
    pending: int = 0


@dataclass
class Meter:
    """Work and seconds of the pipeline, summed over its threads: a part of InputReport."""

    read_s: float = 0.0
    read_bytes: int = 0
    decode_s: float = 0.0
    decoded: int = 0

    def since(self, earlier: "Self") -> dict[str, float]:
        return {name: value - getattr(earlier, name) for name, value in vars(self).items()}


@dataclass
class Task:
    sequence: int
    batch: Batch
    row: int
    sample: Sample | None
    # Set only at the last use of the sample.
    block: Block | None
    seed: str


@dataclass
class Loader:
    """An iterator of batches, epoch after epoch. A new loader can resume at the `state` of another one."""

    index: Index
    rank: int
    ranks: int
    batch: int
    cores: int = 2
    seed: int = 1
    policy: Policy = "drop"
    strict: bool = False
    window: int = WINDOW
    pixels: int = images.PIXELS
    floats: bool = field(default=False, metadata={"help": "normalised floats instead of bytes"})
    epoch: int = 0
    start_batch: int = field(default=0, metadata={"help": "first batch of the first epoch"})
    epochs: int | None = field(default=None, metadata={"help": "number of epochs; None: no limit"})
    repeat: int = field(default=1, metadata={"help": "number of uses of a window before the next one is read"})

    def __post_init__(self) -> None:
        self.faults = Faults(self.strict)
        self.pool = Pool()
        self.meter = Meter()
        self.batches = self.order(self.epoch).batches * self.repeat
        if not self.batches:
            raise DataError(
                f"{self.index.location}: {self.index.samples} samples are too few for {self.ranks} ranks with batches "
                f"of {self.batch}; use fewer ranks, a smaller batch or `data_policy: pad`"
            )
        self.closed = False
        self.problem: BaseException | None = None
        self.changed = threading.Condition()
        self.ready: dict[int, Batch] = {}
        self.spare: queue.Queue[Batch] = queue.Queue()
        for _ in range(AHEAD + 1):
            self.spare.put(self.empty())
        self.windows: queue.Queue[list[Slot]] = queue.Queue(maxsize=1)
        self.sample_offsets: dict[int, shards.SampleOffsets] = {}
        self.taken = 0
        self.current: Batch | None = None
        self.any_valid = False
        self.task_lock = threading.Lock()
        self.tasks = self.generate()
        jobs = [self.read, *(partial(self.decode, number) for number in range(max(1, self.cores)))]
        self.threads = [threading.Thread(target=self.guard, args=(job,), daemon=True) for job in jobs]
        for thread in self.threads:
            thread.start()

    @property
    def bound(self) -> int:
        """Upper limit of its memory in bytes. A block is at least half full, or it holds a single sample."""
        compressed = 3 * self.window * (self.index.largest + 2 * shards.RECORD) * 2 + (4 + self.cores) * shards.BLOCK
        return compressed + (AHEAD + 1) * self.batch_bytes

    @property
    def batch_bytes(self) -> int:
        return self.batch * self.pixels * self.pixels * (12 if self.floats else 4)

    @property
    def state(self) -> tuple[int, int]:
        """Epoch and batch that come next."""
        return divmod(self.epoch * self.batches + self.start_batch + self.taken, self.batches)

    def order(self, epoch: int) -> SampleOrder:
        counts = tuple(shard.samples for shard in self.index.shards)
        return SampleOrder(counts, self.seed, epoch, self.rank, self.ranks, self.batch, self.window, self.policy)

    def empty(self) -> Batch:
        shape = (3, self.pixels, self.pixels) if self.floats else (self.pixels, self.pixels, 4)
        pixels = numpy.zeros((self.batch, *shape), numpy.float32 if self.floats else numpy.uint8)
        return Batch(pixels, numpy.zeros(self.batch, numpy.int64), numpy.zeros(self.batch, bool), [""] * self.batch)

    def __iter__(self) -> "Self":
        return self

    def __next__(self) -> Batch:
        """The next batch. It is valid until the following call."""
        if self.current is not None:
            self.spare.put(self.current)
            self.current = None
        if self.epochs is not None and self.taken == self.epochs * self.batches - self.start_batch:
            self.close()
            raise StopIteration
        with self.changed:
            got = self.changed.wait_for(lambda: self.taken in self.ready or self.problem or self.closed, BATCH_TIMEOUT)
            if self.problem is not None:
                raise self.problem
            if not got or self.closed:
                raise DataError(f"{self.index.location}: no batch within {BATCH_TIMEOUT:.0f} s")
            self.current = self.ready.pop(self.taken)
        self.taken += 1
        return self.current

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for thread in self.threads:
            thread.join(timeout=2 * streams.TIMEOUT)

    def guard(self, job: Callable[[], None]) -> None:
        """Run a thread's job; pass its error on to the consumer, which would wait for ever otherwise."""
        try:
            job()
        except Closed:
            pass
        except BaseException as error:
            with self.changed:
                self.problem = self.problem or error
                self.closed = True
                self.changed.notify_all()

    def check(self) -> None:
        if self.closed:
            raise Closed

    def poll(self, attempt: Callable[[], T]) -> T:
        """Call a queue until it has room or an item, or until the loader is closed."""
        while True:
            self.check()
            with suppress(queue.Full, queue.Empty):
                return attempt()

    def remaining(self) -> Iterator[tuple[int, int, Window]]:
        """Epoch, first row in the epoch, and window, of all windows still to be read."""
        for epoch in count(self.epoch) if self.epochs is None else range(self.epoch, self.epoch + self.epochs):
            begin = 0
            for window in self.order(epoch).windows():
                size = len(window.order) * self.repeat
                if epoch > self.epoch or begin + size > self.start_batch * self.batch:
                    yield epoch, begin, window
                begin += size

    # Reading

    def read(self) -> None:
        for _, _, window in self.remaining():
            self.poll(partial(self.windows.put, self.read_window(window), timeout=POLL))

    def read_window(self, window: Window) -> list[Slot]:
        """The samples of a window by position; None for a sample that could not be read."""
        slots: list[Slot] = [None] * len(window.order)
        begin = 0
        used = {piece.shard for piece in window.pieces}
        self.sample_offsets = {shard: found for shard, found in self.sample_offsets.items() if shard in used}
        for piece in window.pieces:
            shard = self.index.shards[piece.shard]
            if piece.shard not in self.sample_offsets:
                try:
                    self.sample_offsets[piece.shard] = shards.load_offsets(self.index, shard)
                except shards.MissingFile as error:
                    self.faults.add("index of a shard is missing", str(error), piece.last - piece.first)
                    begin += piece.last - piece.first
                    continue
            offsets = self.sample_offsets[piece.shard]
            starts = offsets.starts
            before = time.perf_counter()
            for block in shards.blocks(self.index, shard, offsets, piece.first, piece.last, self.pool, self.faults):
                self.check()
                for sample in block.samples:
                    slots[begin + bisect_left(starts, sample[3]) - piece.first] = (sample, block)
            self.meter.read_s += time.perf_counter() - before
            self.meter.read_bytes += starts[piece.last] - starts[piece.first]
            begin += piece.last - piece.first
        return slots

    # Decoding

    def generate(self) -> Iterator[Task]:
        """Decoding tasks in order."""
        for position, (epoch, at, sample, block) in enumerate(self.uses()):
            sequence, row = divmod(position, self.batch)
            if row == 0:
                batch = self.poll(partial(self.spare.get, timeout=POLL))
                batch.pending = self.batch
            yield Task(sequence, batch, row, sample, block, f"{self.seed}/{epoch}/{self.rank}/{at}")

    def uses(self) -> Iterator[tuple[int, int, Sample | None, Block | None]]:
        """Epoch, row in the epoch, sample (None: padding) and, at the last use of the sample, its block."""
        epoch_before, at = self.epoch, 0
        size = self.batches * self.batch
        for epoch, begin, window in self.remaining():
            if epoch != epoch_before:
                yield from ((epoch_before, pad, None, None) for pad in range(at, size))
                epoch_before = epoch
            at = begin
            done = self.start_batch * self.batch if epoch == self.epoch else 0
            slots = self.poll(partial(self.windows.get, timeout=POLL))
            for use in range(self.repeat):
                for number in window.order:
                    slot = slots[number]
                    last = slot[1] if slot and use == self.repeat - 1 else None
                    if done <= at < size:
                        yield epoch, at, slot[0] if slot else None, last
                    elif last:
                        last.release()
                    at += 1
        yield from ((epoch_before, pad, None, None) for pad in range(at, size))

    def decode(self, number: int) -> None:
        # Pin each thread to its own core: the scheduler leaves threads that often wait for each other on one core.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(self.rank * max(1, self.cores) + number) % len(cores)]})
        while True:
            with self.task_lock:
                task = next(self.tasks, None)
            if task is None:
                return
            self.check()
            begin = time.perf_counter()
            valid = task.sample is not None and self.decode_into(task.batch, task.row, task.sample, task.seed)
            spent = time.perf_counter() - begin
            if task.block is not None:
                task.block.release()
            with self.changed:
                task.batch.valid[task.row] = valid
                self.any_valid = self.any_valid or valid
                self.meter.decode_s += spent
                self.meter.decoded += valid
                task.batch.pending -= 1
                if not task.batch.pending:
                    self.complete(task.batch, task.sequence)
                    self.ready[task.sequence] = task.batch
                    self.changed.notify_all()

    def decode_into(self, batch: Batch, row: int, sample: Sample, seed: str) -> bool:
        name, jpeg, label, _ = sample
        key = shards.key_of(name)
        if not 0 <= label < self.index.classes:
            self.faults.add("label is out of range", key)
            return False
        shape = (self.pixels, self.pixels, 4)
        target = images.SCRATCH.array("row", shape) if self.floats else batch.pixels[row]
        try:
            images.augment(jpeg, random.Random(seed), self.pixels, target)
        except images.NotAnImage as error:
            self.faults.add("not an image", f"{key} ({error})")
            return False
        if self.floats:
            images.normalise(target, batch.pixels[row])
        batch.labels[row] = label
        batch.keys[row] = key
        return True

    def complete(self, batch: Batch, sequence: int) -> None:
        """Copy valid rows into invalid ones. A batch without a valid row keeps the images of an earlier batch."""
        good = numpy.flatnonzero(batch.valid)
        if not self.any_valid and sequence + 1 >= min(self.batches, UNREADABLE_BATCHES):
            raise DataError(f"{self.index.location}: no sample could be read: {'; '.join(self.faults.examples[:1])}")
        for number, row in enumerate(numpy.flatnonzero(~batch.valid)):
            batch.keys[row] = ""
            if len(good):
                source = good[number % len(good)]
                batch.pixels[row], batch.labels[row] = batch.pixels[source], batch.labels[source]
