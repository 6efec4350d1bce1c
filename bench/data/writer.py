"""Write tar shards with their index: what is finished stays, so an interrupted command goes on where it stopped."""

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
from cluster.core.errors import InfraError, UserError

# First line of DALI's index files, which ours are.
IDX_VERSION = "v1.2"
# Longer names need a second header, which readers of plain tar know but which costs a record per file.
LONGEST_KEY = 95


@dataclass(frozen=True)
class Item:
    """One sample to be: its name, its class, and how to get its bytes."""

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
    """A file that is written, counted and hashed at once."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self.file.write(data)
        self.sha.update(data)
        self.bytes += len(data)
        return len(data)


class BadImage(Exception):
    """The bytes of an item are no image."""


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
                old = json.loads(file.read_text())
                known = [Finished(**one) for one in old["shards"]]
                same = old["source"] == facts["source"]
            except (ValueError, KeyError, TypeError):
                raise UserError(f"--out: {file} is not an index of shards; name an empty folder") from None
            if not same:
                raise UserError(f"--out: {path} holds another data set ({old['source']}); name an empty folder")
            self.done = {one.name: one for one in known if self.intact(one)}
        elif any(path.glob("*.tar")):
            raise UserError(f"--out: {path} holds shards of something else; name an empty folder")

    def intact(self, one: Finished) -> bool:
        tar = self.path / one.name
        return tar.exists() and tar.stat().st_size == one.bytes and tar.with_suffix(".idx").exists()

    def write(self, name: str, items: Iterable[Item], check: Callable[[bytes], None]) -> Finished:
        """One shard; it gets its name when it is whole."""
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
                # The end of an archive is two empty records, padded to tar's block.
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
            raise InfraError(f"{part}: {error.strerror}; shards finished so far are kept, run it again") from None
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
    """A file in the archive; owner and time are fixed, so the same images give the same shard."""
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
    """Write the shards that are not there yet; `step` is told how many items were dealt with."""

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
