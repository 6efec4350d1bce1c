"""Read a data set of tar shards: its index, and a range of samples as blocks in memory.

A data set is a local folder or an HTTP address with index.json, the shards NAME.tar, and for each shard a file NAME.idx
with the offsets of its samples (DALI reads the same format). With these offsets a rank can start in the middle of a
shard, and a damaged sample does not affect the next one.
"""

from __future__ import annotations

import json
import re
import struct
import threading
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from bench.worker.streams import FileStream, HttpStream, Stream, StreamError

INDEX = "index.json"
RECORD = 512
# Fits the level-2 cache of a core. Larger blocks would go through main memory.
BLOCK = 640 << 10
EXAMPLES = 20


class DataError(Exception):
    """The data set cannot be read any further. The text names the file."""


class MissingFile(DataError):
    """A file of the data set does not exist."""


class Faults:
    """Counts the samples that were skipped, by reason. In strict mode the first fault stops the run."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []
        self.lock = threading.Lock()

    def add(self, kind: str, where: str, count: int = 1) -> None:
        text = f"{where}: {kind}"
        if self.strict:
            raise DataError(text)
        with self.lock:
            self.counts[kind] += count
            if len(self.examples) < EXAMPLES:
                self.examples.append(text)


@dataclass(frozen=True)
class Shard:
    name: str
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    location: str
    shards: tuple[Shard, ...]
    classes: int
    largest: int = field(metadata={"help": "bytes of the largest sample"})

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


def is_url(location: str) -> bool:
    return location.startswith(("http://", "https://"))


def load_index(location: str) -> Index:
    location = location.rstrip("/")
    try:
        content = json.loads(fetch(location, INDEX))
        if not content.get("complete", True):
            raise DataError(f"{location}/{INDEX}: the data set is not finished; run its `bench data` command again")
        shards = tuple(
            Shard(str(one["name"]), int(one["samples"]), int(one["bytes"]), str(one["sha256"]))
            for one in content["shards"]
        )
        index = Index(location, shards, int(content["classes"]), int(content["largest"]))
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise DataError(f"{location}/{INDEX}: not an index of shards ({type(error).__name__}: {error})") from None
    if not index.samples:
        raise DataError(f"{location}/{INDEX}: the data set has no samples")
    return index


def open_stream(location: str, name: str, start: int, stop: int) -> Stream:
    return (HttpStream if is_url(location) else FileStream)(f"{location}/{name}", start, stop)


def fetch(location: str, name: str) -> bytes:
    """A whole small file."""
    try:
        if is_url(location):
            with closing(HttpStream(f"{location}/{name}", 0, None)) as stream:
                return stream.read_all()
        return (Path(location) / name).read_bytes()
    except FileNotFoundError as error:
        raise MissingFile(f"{location}/{name}: {error.strerror}") from None
    except OSError as error:
        raise DataError(f"{location}/{name}: {error.strerror or error}") from None


# Of one sample, in bytes of the shard: its start, start and end of its image, start and end of its label. The last item
# is the length of its key including the dot, or 0 if image or label is missing. A plain tuple is the fastest to unpack.
Span = tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class SampleOffsets:
    """Where the samples of a shard are, from NAME.idx. `starts` ends with the end of the last sample."""

    starts: array[int]
    spans: list[Span]


def load_offsets(index: Index, shard: Shard) -> SampleOffsets:
    name = f"{shard.name.removesuffix('.tar')}.idx"
    lines = fetch(index.location, name).decode(errors="replace").splitlines()
    found = SampleOffsets(array("q"), [])
    end = 0
    try:
        for line in lines[1:]:
            words = line.split()
            begins = [int(word) for word in words[1::4]]
            spans = {kind: (at, at + int(size)) for kind, at, size in zip(words[::4], begins, words[2::4], strict=True)}
            image, label = spans.get("jpg") or spans.get("jpeg") or (0, 0), spans.get("cls", (0, 0))
            start = min(begins) - RECORD
            key_length = len(words[3].partition(".")[0].encode()) + 1 if image[1] and label[1] else 0
            found.starts.append(start)
            found.spans.append((start, *image, *label, key_length))
            end = padded(max(last for _, last in spans.values()))
    except (ValueError, IndexError):
        raise DataError(f"{index.location}/{name}: line {len(found.starts) + 2} is not an index line") from None
    if len(found.starts) != shard.samples:
        raise DataError(f"{index.location}/{name}: {len(found.starts)} samples, {INDEX} has {shard.samples}")
    found.starts.append(end)
    return found


def padded(size: int) -> int:
    """The size that a file takes in a tar: whole records."""
    return (size + RECORD - 1) & -RECORD


# Key (perhaps with its dot), image, label, and start of the sample in the shard. A plain tuple: one is made per sample.
Sample = tuple[bytearray | bytes, memoryview, int, int]


def key_of(name: bytes | bytearray) -> str:
    return name.partition(b".")[0].decode(errors="replace")


class Block:
    """Consecutive whole samples of a shard in one buffer."""

    __slots__ = ("buffer", "pending", "pool", "samples", "view")

    def __init__(self, pool: Pool, size: int) -> None:
        self.pool = pool
        self.buffer = bytearray(size)
        self.view = memoryview(self.buffer)
        self.samples: list[Sample] = []
        self.pending = 0

    def release(self, count: int = 1) -> None:
        """Mark samples as used; with the last one the block returns to the pool."""
        with self.pool.lock:
            self.pending -= count
            if self.pending <= 0:
                self.pool.give(self)


class Pool:
    """Reusable blocks. `peak_bytes` is the most that existed at once."""

    def __init__(self, size: int = BLOCK) -> None:
        self.size = size
        self.free: list[Block] = []
        self.lock = threading.Lock()
        self.bytes = 0
        self.peak_bytes = 0

    def take(self, size: int) -> Block:
        if size <= self.size:
            try:
                return self.free.pop()
            except IndexError:
                size = self.size
        with self.lock:
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        return Block(self, size)

    def give(self, block: Block) -> None:
        """Take a block back; the caller holds the lock. A larger block, made for one large sample, is not kept."""
        block.samples = []
        if len(block.buffer) == self.size:
            self.free.append(block)
        else:
            self.bytes -= len(block.buffer)


# Name, size, type and magic of a tar header.
MEMBER = struct.Struct("100s24x12s20x1s100x5s").unpack_from


def runs(starts: array[int], first: int, last: int, limit: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Divide samples first to last into runs that fit a block. A sample larger than a block is a run of its own."""
    while first < last:
        after = max(first + 1, bisect_right(starts, starts[first] + limit, first, last + 1) - 1)
        yield first, after
        first = after


def blocks(
    index: Index, shard: Shard, offsets: SampleOffsets, first: int, last: int, pool: Pool, faults: Faults
) -> Iterator[Block]:
    """Samples first to last of a shard, read in order."""
    starts = offsets.starts
    try:
        stream = open_stream(index.location, shard.name, starts[first], starts[last])
    except StreamError as error:
        raise DataError(f"{index.location}/{shard.name}: {error}") from None
    except OSError as error:
        faults.add(f"shard not readable ({error.strerror})", shard.name, last - first)
        return
    with closing(stream):
        for begin, after in runs(starts, first, last, pool.size):
            base = starts[begin]
            size = starts[after] - base
            block = pool.take(size)
            try:
                got = stream.fill(block.view[:size])
            except OSError as error:
                raise DataError(f"{index.location}/{shard.name}: {error.strerror or error}") from None
            whole = after if got == size else bisect_right(starts, base + got) - 1
            parse(block, offsets, begin, whole, shard.name, faults)
            block.pending = len(block.samples)
            if block.pending:
                yield block
            else:
                block.release(0)
            if got < size:
                faults.add("shard is truncated", f"{shard.name} at byte {base + got}", last - whole)
                return


def parse(block: Block, offsets: SampleOffsets, first: int, last: int, shard: str, faults: Faults) -> None:
    """Find samples first to last in a block that starts with the first.

    The index gives the positions. A sample is accepted without further checks if the tar headers at these positions
    have the same key; otherwise its headers are parsed one by one.
    """
    buffer, view, add = block.buffer, block.view, block.samples.append
    base = offsets.starts[first]
    for start, image, image_end, label, label_end, key_length in offsets.spans[first:last]:
        if key_length:
            at = image - base
            to = label - base
            name = buffer[at - 512 : at - 512 + key_length]
            if name == buffer[to - 512 : to - 512 + key_length]:
                try:
                    add((name, view[at : image_end - base], int(buffer[to : label_end - base]), start))
                    continue
                except ValueError:
                    pass
        following = offsets.starts[bisect_right(offsets.starts, start)]
        parse_headers(block, start - base, following - base, start, shard, faults)


def parse_headers(block: Block, at: int, end: int, start: int, shard: str, faults: Faults) -> None:
    """Add a sample by its tar headers: members in any order, other members in between, or a damaged one."""
    images: dict[bytes, memoryview] = {}
    labels: dict[bytes, memoryview] = {}
    where = f"{shard} at byte {start}"
    while at + RECORD <= end:
        name, size, kind, magic = MEMBER(block.buffer, at)
        digits = size.rstrip(b"\0 ")
        length = int(digits, 8) if re.fullmatch(b"[0-7]+", digits) else end
        if magic != b"ustar" or at + RECORD + length > end:
            faults.add("tar header is damaged", where)
            return
        stem, _, extension = name.partition(b"\0")[0].partition(b".")
        if kind in (b"0", b"\0"):
            body = block.view[at + RECORD : at + RECORD + length]
            if extension.lower() in (b"jpg", b"jpeg"):
                images[stem] = body
            elif extension == b"cls":
                labels[stem] = body
        at += RECORD + padded(length)
    if not images:
        faults.add("image is missing", where)
        return
    stem, image = next(iter(images.items()))
    named = f"{where} ({stem.decode(errors='replace')})"
    if stem not in labels:
        faults.add("label is missing", named)
    elif not (text := bytes(labels[stem]).strip()).isdigit():
        faults.add("label is not a number", named)
    else:
        block.samples.append((stem, image, int(text), start))
