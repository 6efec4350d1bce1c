"""Batches of decoded images for one rank, made ready while the device computes.

One thread reads windows of samples, `cores` threads decode them into the rows of the next batches, and the device
takes finished batches in order. Memory is bounded whatever the size of a shard (see `bound`): three windows of
compressed samples (one read, one waiting, one being decoded) and AHEAD + 1 batches of pixels.
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy
from numpy.typing import NDArray

from bench.worker import images, shards
from bench.worker.order import Order, Policy, Window
from bench.worker.shards import Block, DataError, Faults, Index, Pool, Sample

# Batches that may be ready before the device asks.
AHEAD = 2
WINDOW = 512
# The longest anybody waits for a batch: longer than a reader tries to get its server back.
PATIENCE = 120.0
POLL = 0.2
# After so many batches without one readable sample the data set is taken as unreadable.
HOPELESS = 20
Slot = tuple[Sample, Block] | None


class Closed(Exception):
    """The loader was closed; its threads end."""


@dataclass
class Batch:
    """Images of one step. Rows that are not valid repeat others: padding, or in place of a damaged sample."""

    pixels: NDArray[Any]
    labels: NDArray[numpy.int64]
    valid: NDArray[numpy.bool_]
    keys: list[str]
    left: int = 0


@dataclass
class Meter:
    """What the pipeline did, and the seconds it took, summed over its threads."""

    read_s: float = 0.0
    read_bytes: int = 0
    decode_s: float = 0.0
    decode_cpu_s: float = 0.0
    decoded: int = 0
    waited_s: float = 0.0

    def copy(self) -> Meter:
        return Meter(**vars(self))

    def since(self, earlier: Meter) -> dict[str, float]:
        return {name: value - getattr(earlier, name) for name, value in vars(self).items()}


@dataclass
class Task:
    sequence: int
    batch: Batch
    row: int
    sample: Sample | None
    # Set where this is the last use of the sample.
    block: Block | None
    seed: str


@dataclass
class Loader:
    """Iterate over it, epoch after epoch. `state` says where it stands; a new loader can go on from there."""

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
    offset: int = field(default=0, metadata={"help": "batches of the epoch that are done"})
    epochs: int | None = field(default=None, metadata={"help": "end after so many; None: never"})
    repeat: int = field(default=1, metadata={"help": "how often a window is used before the next one is read"})

    def __post_init__(self) -> None:
        self.faults = Faults(self.strict)
        self.pool = Pool()
        self.meter = Meter()
        self.batches = self.order(self.epoch).batches * self.repeat
        if not self.batches:
            raise DataError(
                f"{self.index.location}: {self.index.samples} samples are too few for {self.ranks} ranks with batches "
                f"of {self.batch}; use fewer ranks, a smaller batch or the policy pad"
            )
        self.closed = False
        self.problem: BaseException | None = None
        self.changed = threading.Condition()
        self.ready: dict[int, Batch] = {}
        self.spare: queue.Queue[Batch] = queue.Queue()
        for _ in range(AHEAD + 1):
            self.spare.put(self.empty())
        self.windows: queue.Queue[list[Slot]] = queue.Queue(maxsize=1)
        self.places: dict[int, shards.Places] = {}
        self.taken = 0
        self.current: Batch | None = None
        self.good = False
        self.turn = threading.Lock()
        self.tasks = self.generate()
        jobs = [self.read, *(partial(self.decode, number) for number in range(max(1, self.cores)))]
        self.threads = [threading.Thread(target=self.guard, args=(job,), daemon=True) for job in jobs]
        for thread in self.threads:
            thread.start()

    @property
    def bound(self) -> int:
        """The most bytes it holds. A block is at least half full, or one sample fills it."""
        compressed = 3 * self.window * (self.index.largest + 2 * shards.RECORD) * 2 + (4 + self.cores) * shards.BLOCK
        return compressed + (AHEAD + 1) * self.empty_bytes

    @property
    def empty_bytes(self) -> int:
        return self.batch * self.pixels * self.pixels * (12 if self.floats else 4)

    @property
    def state(self) -> tuple[int, int]:
        """Epoch and batches of it that were taken."""
        return divmod(self.epoch * self.batches + self.offset + self.taken, self.batches)

    def order(self, epoch: int) -> Order:
        counts = tuple(shard.samples for shard in self.index.shards)
        return Order(counts, self.seed, epoch, self.rank, self.ranks, self.batch, self.window, self.policy)

    def empty(self) -> Batch:
        shape = (3, self.pixels, self.pixels) if self.floats else (self.pixels, self.pixels, 4)
        pixels = numpy.zeros((self.batch, *shape), numpy.float32 if self.floats else numpy.uint8)
        return Batch(pixels, numpy.zeros(self.batch, numpy.int64), numpy.zeros(self.batch, bool), [""] * self.batch)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        """The next batch; it stays valid until the one after it is asked for."""
        if self.current is not None:
            self.spare.put(self.current)
            self.current = None
        if self.epochs is not None and self.taken == self.epochs * self.batches - self.offset:
            self.close()
            raise StopIteration
        before = time.perf_counter()
        with self.changed:
            got = self.changed.wait_for(lambda: self.taken in self.ready or self.problem or self.closed, PATIENCE)
            if self.problem is not None:
                raise self.problem
            if not got or self.closed:
                raise DataError(f"{self.index.location}: no batch for {PATIENCE:.0f} s")
            self.current = self.ready.pop(self.taken)
        self.meter.waited_s += time.perf_counter() - before
        self.taken += 1
        return self.current

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for thread in self.threads:
            thread.join(timeout=2 * shards.TIMEOUT)

    def guard(self, job: Any) -> None:
        try:
            job()
        except Closed:
            pass
        except BaseException as error:  # whatever ends a thread must reach the one who waits for it
            with self.changed:
                self.problem = self.problem or error
                self.closed = True
                self.changed.notify_all()

    def check(self) -> None:
        if self.closed:
            raise Closed

    def remaining(self) -> Iterator[tuple[int, int, Window]]:
        """Epoch, row it begins at, and window, for all windows that are still to be read."""
        for epoch in count(self.epoch) if self.epochs is None else range(self.epoch, self.epoch + self.epochs):
            begin = 0
            for window in self.order(epoch).windows():
                size = len(window.order) * self.repeat
                if epoch > self.epoch or begin + size > self.offset * self.batch:
                    yield epoch, begin, window
                begin += size

    # Reading

    def read(self) -> None:
        for _, _, window in self.remaining():
            slots = self.read_window(window)
            while True:
                self.check()
                try:
                    self.windows.put(slots, timeout=POLL)
                    break
                except queue.Full:
                    continue

    def read_window(self, window: Window) -> list[Slot]:
        """The samples of a window by their place in it; None where one could not be read."""
        slots: list[Slot] = [None] * len(window.order)
        begin = 0
        used = {piece.shard for piece in window.pieces}
        self.places = {shard: found for shard, found in self.places.items() if shard in used}
        for piece in window.pieces:
            shard = self.index.shards[piece.shard]
            if piece.shard not in self.places:
                try:
                    self.places[piece.shard] = shards.load_places(self.index, shard)
                except shards.Missing as error:
                    self.faults.add("index of a shard is missing", str(error), piece.last - piece.first)
                    begin += piece.last - piece.first
                    continue
            places = self.places[piece.shard]
            starts = places.starts
            before = time.perf_counter()
            for block in shards.blocks(self.index, shard, places, piece.first, piece.last, self.pool, self.faults):
                self.check()
                for sample in block.samples:
                    slots[begin + bisect_left(starts, sample[3]) - piece.first] = (sample, block)
            self.meter.read_s += time.perf_counter() - before
            self.meter.read_bytes += starts[piece.last] - starts[piece.first]
            begin += piece.last - piece.first
        return slots

    # Decoding

    def generate(self) -> Iterator[Task]:
        """What to decode next, in order."""
        sequence, row = 0, 0
        batch: Batch | None = None
        epoch_before = self.epoch
        size = self.batches * self.batch

        def place(epoch: int, at: int, sample: Sample | None, block: Block | None) -> Task:
            nonlocal sequence, row, batch
            if batch is None:
                batch = self.next_spare()
            task = Task(sequence, batch, row, sample, block, f"{self.seed}/{epoch}/{self.rank}/{at}")
            row += 1
            if row == self.batch:
                sequence, row, batch = sequence + 1, 0, None
            return task

        at = 0
        for epoch, begin, window in self.remaining():
            if epoch != epoch_before:
                for pad in range(at, size):
                    yield place(epoch_before, pad, None, None)
                epoch_before = epoch
            at = begin
            done = self.offset * self.batch if epoch == self.epoch else 0
            slots = self.next_window()
            for turn in range(self.repeat):
                for number in window.order:
                    slot = slots[number]
                    last = slot[1] if slot and turn == self.repeat - 1 else None
                    if done <= at < size:
                        yield place(epoch, at, slot[0] if slot else None, last)
                    elif last:
                        last.release()
                    at += 1
        for pad in range(at, size):
            yield place(epoch_before, pad, None, None)

    def next_window(self) -> list[Slot]:
        while True:
            self.check()
            try:
                return self.windows.get(timeout=POLL)
            except queue.Empty:
                continue

    def next_spare(self) -> Batch:
        while True:
            self.check()
            try:
                batch = self.spare.get(timeout=POLL)
                batch.left = self.batch
                return batch
            except queue.Empty:
                continue

    def decode(self, number: int) -> None:
        # A core of its own: threads that often wait for each other are left on one core by the scheduler.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(self.rank * max(1, self.cores) + number) % len(cores)]})
        while True:
            with self.turn:
                task = next(self.tasks, None)
            if task is None:
                return
            self.check()
            begin, cpu = time.perf_counter(), time.thread_time()
            valid = task.sample is not None and self.decode_into(task.batch, task.row, task.sample, task.seed)
            spent, used = time.perf_counter() - begin, time.thread_time() - cpu
            if task.block is not None:
                task.block.release()
            with self.changed:
                task.batch.valid[task.row] = valid
                self.good = self.good or valid
                self.meter.decode_s += spent
                self.meter.decode_cpu_s += used
                self.meter.decoded += valid
                task.batch.left -= 1
                if not task.batch.left:
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
        target = images.SCRATCH.array("row", shape, numpy.uint8) if self.floats else batch.pixels[row]
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
        """Fill rows that have no image with others of the batch; a batch without any keeps older images."""
        good = numpy.flatnonzero(batch.valid)
        if not self.good and sequence + 1 >= min(self.batches, HOPELESS):
            raise DataError(f"{self.index.location}: no sample could be read: {'; '.join(self.faults.examples[:1])}")
        for number, row in enumerate(numpy.flatnonzero(~batch.valid)):
            batch.keys[row] = ""
            if len(good):
                source = good[number % len(good)]
                batch.pixels[row], batch.labels[row] = batch.pixels[source], batch.labels[source]
