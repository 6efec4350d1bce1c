"""Read tar shards: their index, a part of one as blocks of samples, and what is wrong with them.

A data set is a folder, here or behind HTTP, with index.json, the shards, and beside each shard a file NAME.idx that
says where its samples begin (the format DALI reads too). So a rank can begin in the middle of a shard, and a damaged
sample costs only itself.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import struct
import threading
import urllib.parse
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

INDEX = "index.json"
RECORD = 512
# Fits the second-level cache of a core: larger blocks are copied through memory.
BLOCK = 640 << 10
ATTEMPTS = 6
FIRST_PAUSE = 0.2
TIMEOUT = 5.0
EXAMPLES = 20
log = logging.getLogger(__name__)


class DataError(Exception):
    """A data set that cannot be read on; the text names the shard."""


class Missing(DataError):
    """A file of the data set is not there, and whoever keeps it says so."""


class Faults:
    """Counts what had to be skipped; in strict mode the first one stops the run."""

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

    def __bool__(self) -> bool:
        return bool(self.counts)


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
            raise DataError(f"{location}/{INDEX}: the data set is not finished; run the command that makes it again")
        shards = tuple(
            Shard(str(one["name"]), int(one["samples"]), int(one["bytes"]), str(one["sha256"]))
            for one in content["shards"]
        )
        index = Index(location, shards, int(content["classes"]), int(content["largest"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{location}/{INDEX}: not an index of shards ({type(error).__name__}: {error})") from None
    if not index.samples:
        raise DataError(f"{location}/{INDEX}: the data set has no samples")
    return index


def fetch(location: str, name: str) -> bytes:
    """A whole small file."""
    try:
        if is_url(location):
            with HttpStream(location, name, 0, None) as stream:
                return stream.rest()
        return (Path(location) / name).read_bytes()
    except FileNotFoundError as error:
        raise Missing(f"{location}/{name}: {error.strerror}") from None
    except OSError as error:
        raise DataError(f"{location}/{name}: {error.strerror or error}") from None


@dataclass(frozen=True)
class Places:
    """Where the samples of a shard are, from its NAME.idx.

    starts has one more entry: the end of the last sample. spans has for each sample where it starts, where its image
    begins and ends, where its label does, and the length of its key with the dot, 0 where it lacks one of the two.
    """

    starts: array[int]
    spans: list[tuple[int, int, int, int, int, int]]


def load_places(index: Index, shard: Shard) -> Places:
    name = f"{shard.name.removesuffix('.tar')}.idx"
    lines = fetch(index.location, name).decode(errors="replace").splitlines()
    found = Places(array("q"), [])
    end = 0
    try:
        for line in lines[1:]:
            words = line.split()
            begins = [int(word) for word in words[1::4]]
            spans = {kind: (at, at + int(size)) for kind, at, size in zip(words[::4], begins, words[2::4], strict=True)}
            image, label = spans.get("jpg") or spans.get("jpeg") or (0, 0), spans.get("cls", (0, 0))
            found.starts.append(min(begins) - RECORD)
            length = len(words[3].partition(".")[0].encode()) + 1 if image[1] and label[1] else 0
            found.spans.append((min(begins) - RECORD, *image, *label, length))
            end = padded(max(last for _, last in spans.values()))
    except (ValueError, IndexError):
        raise DataError(f"{index.location}/{name}: line {len(found.starts) + 2} is not an index line") from None
    if len(found.starts) != shard.samples:
        raise DataError(f"{index.location}/{name}: {len(found.starts)} samples, {INDEX} says {shard.samples}")
    found.starts.append(end)
    return found


def padded(size: int) -> int:
    return (size + RECORD - 1) & -RECORD


class FileStream:
    """Bytes start to stop of a file, in order."""

    def __init__(self, location: str, name: str, start: int, stop: int) -> None:
        self.where = f"{location}/{name}"
        self.left = stop - start
        try:
            self.file = os.open(self.where, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise FileNotFoundError(error.errno, error.strerror) from None
        os.posix_fadvise(self.file, start, self.left, os.POSIX_FADV_SEQUENTIAL)
        os.lseek(self.file, start, os.SEEK_SET)

    def fill(self, view: memoryview) -> int:
        """Fill the view; fewer bytes mean that the file ends there."""
        got = 0
        while got < len(view):
            count = os.readv(self.file, [view[got:] if got else view])
            if not count:
                break
            got += count
        return got

    def close(self) -> None:
        os.close(self.file)

    def __enter__(self) -> FileStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HttpStream:
    """The same over HTTP by a range request; a connection that breaks is made again where it broke."""

    def __init__(self, location: str, name: str, start: int, stop: int | None) -> None:
        self.where = f"{location}/{name}"
        url = urllib.parse.urlsplit(self.where)
        self.kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self.host, self.path = url.netloc, urllib.parse.quote(url.path)
        self.position, self.stop = start, stop
        self.connection: http.client.HTTPConnection | None = None
        self.response: http.client.HTTPResponse | None = None
        self.failed = 0
        self.pause = threading.Event()
        self.open()

    def open(self) -> None:
        while self.response is None:
            try:
                self.request()
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, FileNotFoundError):
                    raise
                self.again(error)

    def request(self) -> None:
        self.connection = self.kind(self.host, timeout=TIMEOUT)
        last = "" if self.stop is None else str(self.stop - 1)
        ranged = self.stop is not None or self.position > 0
        headers = {"Range": f"bytes={self.position}-{last}"} if ranged else {}
        self.connection.request("GET", self.path, headers=headers)
        response = self.connection.getresponse()
        if response.status == 404:
            raise FileNotFoundError(2, "no such file on the server")
        if response.status >= 500:
            raise http.client.HTTPException(f"status {response.status}")
        if response.status != (206 if ranged else 200):
            raise DataError(f"{self.where}: status {response.status}; the server must allow range requests")
        self.response = response

    def again(self, error: Exception) -> None:
        """Wait before the next attempt, longer each time; give up with an error that names the shard."""
        self.close()
        self.failed += 1
        reason = str(error) or type(error).__name__
        if self.failed >= ATTEMPTS:
            raise DataError(f"{self.where}: {reason}; gave up after {ATTEMPTS} attempts") from None
        log.warning("%s: error: %s; attempt %d of %d", self.where, reason, self.failed, ATTEMPTS)
        self.pause.wait(FIRST_PAUSE * 2**self.failed)

    def fill(self, view: memoryview) -> int:
        got = 0
        while got < len(view):
            self.open()
            try:
                count = self.response.readinto(view[got:]) if self.response else 0
            except (OSError, http.client.HTTPException) as error:
                self.again(error)
                continue
            if count:
                got += count
                self.position += count
                self.failed = 0
            elif self.ended():
                break
            else:
                self.again(http.client.IncompleteRead(b""))
        return got

    def ended(self) -> bool:
        """Whether the server sent all it promised: if so the file is shorter than its index says."""
        return self.response is None or not self.response.length

    def rest(self) -> bytes:
        while True:
            try:
                self.open()
                return self.response.read() if self.response else b""
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, FileNotFoundError):
                    raise
                self.again(error)

    def close(self) -> None:
        self.response = None
        if self.connection:
            self.connection.close()

    def __enter__(self) -> HttpStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Stream = FileStream | HttpStream


def open_stream(location: str, name: str, start: int, stop: int) -> Stream:
    return (HttpStream if is_url(location) else FileStream)(location, name, start, stop)


# key with what follows it in the tar header, image, label, where the sample begins in the shard
Sample = tuple[bytearray | bytes, memoryview, int, int]


def key_of(name: bytes | bytearray) -> str:
    return name.partition(b".")[0].decode(errors="replace")


class Block:
    """Some whole samples of a shard in one buffer."""

    __slots__ = ("buffer", "left", "pool", "samples", "view")

    def __init__(self, pool: Pool, size: int) -> None:
        self.pool = pool
        self.buffer = bytearray(size)
        self.view = memoryview(self.buffer)
        self.samples: list[Sample] = []
        self.left = 0

    def release(self, count: int = 1) -> None:
        """So many of its samples were used."""
        with self.pool.lock:
            self.left -= count
            if self.left <= 0:
                self.pool.give(self)


class Pool:
    """Blocks that are used again and again. One comes back when the last of its samples was used."""

    def __init__(self, size: int = BLOCK) -> None:
        self.size = size
        self.free: list[Block] = []
        self.lock = threading.Lock()
        self.bytes = 0
        self.most = 0

    def take(self, size: int) -> Block:
        if size <= self.size:
            try:
                return self.free.pop()
            except IndexError:
                size = self.size
        with self.lock:
            self.bytes += size
            self.most = max(self.most, self.bytes)
        return Block(self, size)

    def give(self, block: Block) -> None:
        """Only under the lock. A block of unusual size, for a large sample, is not kept."""
        block.samples = []
        if len(block.buffer) == self.size:
            self.free.append(block)
        else:
            self.bytes -= len(block.buffer)


# Name, size, kind, magic of any header.
MEMBER = struct.Struct("100s24x12s20x1s100x5s").unpack_from


def runs(offsets: array[int], first: int, last: int, limit: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Samples first to last in runs that fit a block each, or of one sample that is larger."""
    while first < last:
        after = max(first + 1, bisect_right(offsets, offsets[first] + limit, first, last + 1) - 1)
        yield first, after
        first = after


def blocks(
    index: Index, shard: Shard, places: Places, first: int, last: int, pool: Pool, faults: Faults
) -> Iterator[Block]:
    """Samples first to last of a shard, read in order."""
    starts = places.starts
    try:
        stream = open_stream(index.location, shard.name, starts[first], starts[last])
    except FileNotFoundError as error:
        faults.add(f"shard not readable ({error.strerror})", shard.name, last - first)
        return
    with stream:
        for begin, after in runs(starts, first, last, pool.size):
            base = starts[begin]
            size = starts[after] - base
            block = pool.take(size)
            got = stream.fill(block.view[:size])
            whole = after if got == size else bisect_right(starts, base + got) - 1
            parse(block, places, begin, whole, shard.name, faults)
            block.left = len(block.samples)
            if block.left:
                yield block
            else:
                block.release(0)
            if got < size:
                faults.add("shard is truncated", f"{shard.name} at byte {base + got}", last - whole)
                return


def parse(block: Block, places: Places, first: int, last: int, shard: str, faults: Faults) -> None:
    """Find samples first to last in a block that begins with the first.

    Where things are is known from the index. That the headers name the same sample says that it is so here; anything
    else is looked at header by header.
    """
    buffer, view, add = block.buffer, block.view, block.samples.append
    base = places.starts[first]
    for start, image, end, label, final, length in places.spans[first:last]:
        if length:
            at = image - base
            to = label - base
            name = buffer[at - 512 : at - 512 + length]
            if name == buffer[to - 512 : to - 512 + length]:
                try:
                    add((name, view[at : end - base], int(buffer[to : final - base]), start))
                    continue
                except ValueError:
                    pass
        following = places.starts[bisect_right(places.starts, start)]
        slow(block, start - base, following - base, start, shard, faults)


def slow(block: Block, at: int, end: int, start: int, shard: str, faults: Faults) -> None:
    """A sample of any other layout: members in any order, other members between, or a damaged one."""
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
