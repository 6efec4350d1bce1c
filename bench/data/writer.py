"""Write tar shards and their index. Finished shards are kept, so an interrupted command resumes where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from bench.worker.shards import INDEX, RECORD, padded
from cluster.core import files
from cluster.core.errors import InfraError, UserError

# Version in the first line of DALI's index files. Ours have the same format.
IDX_VERSION = "v1.2"
# A longer name needs a second tar header per file.
LONGEST_KEY = 95


@dataclass(frozen=True)
class Item:
    """A sample to write: its key, its class, a function that returns its bytes, and its source for messages."""

    key: str
    label: int
    load: Callable[[], bytes]
    origin: str


@dataclass
class Finished:
    name: str
    samples: int
    bytes: int
    sha256: str
    largest: int
    skipped: list[dict[str, str]] = field(default_factory=list)


class Hashed:
    """A file writer that also counts and hashes the bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.file.write(data)
        self.sha.update(data)
        self.bytes += len(data)
        return len(data)


class BadImage(Exception):
    """The bytes of an item are not an image."""


class Folder:
    """A folder of shards under construction."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.facts = facts
        self.done: dict[str, Finished] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out: cannot make {path}: {error.strerror}") from None
        file = path / INDEX
        if file.exists():
            try:
                old = files.mapping(file)
                known = [Finished(**one) for one in old["shards"]]
                same = old["source"] == facts["source"]
            except (UserError, KeyError, TypeError):
                raise UserError(f"--out: {file} is not an index of shards; give an empty folder") from None
            if not same:
                raise UserError(f"--out: {path} has another data set ({old['source']}); give an empty folder")
            self.done = {one.name: one for one in known if self.intact(one)}
        elif any(path.glob("*.tar")):
            raise UserError(f"--out: {path} has shards but no {INDEX}; give an empty folder")

    def intact(self, one: Finished) -> bool:
        tar = self.path / one.name
        return tar.exists() and tar.stat().st_size == one.bytes and tar.with_suffix(".idx").exists()

    def write(self, name: str, items: Iterable[Item], check: Callable[[bytes], None]) -> Finished:
        """Write one shard. It is renamed from NAME.part when it is complete."""
        part = self.path / f"{name}.part"
        lines: list[str] = []
        finished = Finished(name, 0, 0, "", 0)
        try:
            with part.open("wb") as file:
                out = Hashed(file)
                for item in items:
                    data = item.load()
                    try:
                        check(data)
                    except BadImage as error:
                        finished.skipped.append({"name": item.origin, "why": str(error)})
                        continue
                    label = str(item.label).encode()
                    lines.append(
                        f"jpg {out.bytes + RECORD} {len(data)} {item.key}.jpg "
                        f"cls {out.bytes + 2 * RECORD + padded(len(data))} {len(label)} {item.key}.cls"
                    )
                    member(out, f"{item.key}.jpg", data)
                    member(out, f"{item.key}.cls", label)
                    finished.samples += 1
                    finished.largest = max(finished.largest, 2 * RECORD + padded(len(data)) + padded(len(label)))
                # A tar ends with two empty records, padded to its block size.
                out.write(bytes(2 * RECORD))
                out.write(bytes(-out.bytes % tarfile.RECORDSIZE))
                file.flush()
                os.fsync(file.fileno())
            finished.bytes, finished.sha256 = out.bytes, out.sha.hexdigest()
            idx = "\n".join([f"{IDX_VERSION} {len(lines)}", *lines]) + "\n"
            (self.path / name).with_suffix(".idx").write_text(idx)
            part.rename(self.path / name)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise InfraError(f"{part}: {error.strerror}; finished shards are kept; run the command again") from None
        self.done[name] = finished
        self.save(complete=False)
        return finished

    def save(self, complete: bool) -> None:
        shards = [asdict(self.done[name]) for name in sorted(self.done)]
        content = {
            **self.facts,
            "complete": complete,
            "samples": sum(one["samples"] for one in shards),
            "bytes": sum(one["bytes"] for one in shards),
            "largest": max((one["largest"] for one in shards), default=0),
            "skipped": sum(len(one["skipped"]) for one in shards),
            "shards": shards,
        }
        part = self.path / f"{INDEX}.part"
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.rename(self.path / INDEX)


def member(out: Hashed, name: str, data: bytes) -> None:
    """Add a file. Owner and time are fixed, so the same images give the same shard."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o444
    out.write(info.tobuf(format=tarfile.USTAR_FORMAT))
    out.write(data)
    out.write(bytes(-len(data) % RECORD))


def refuse_duplicates(items: Iterable[Item]) -> None:
    seen: dict[str, str] = {}
    for item in items:
        if item.key in seen:
            raise UserError(f"two images have the key {item.key}: {seen[item.key]} and {item.origin}; rename one")
        seen[item.key] = item.origin


def build(
    folder: Folder, groups: list[tuple[str, list[Item]]], check: Callable[[bytes], None], step: Callable[[int], None]
) -> Iterator[Finished]:
    """Write the missing shards. `step` is called with the number of items done."""

    def counted(items: list[Item]) -> Iterator[Item]:
        for item in items:
            yield item
            step(1)

    for name, items in groups:
        if name in folder.done:
            step(len(items))
            yield folder.done[name]
        else:
            yield folder.write(name, counted(items), check)
    folder.save(complete=True)
