"""Verify a folder of shards against its index: sizes, checksums, tar headers, keys, labels, images."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path

from bench.worker import images, shards
from bench.worker.shards import DataError, Index, Shard

# Problems listed per shard.
LIMIT = 100


def verify(location: Path, step: Callable[[int], None]) -> list[str]:
    """Problems, one line each."""
    index = shards.load_index(str(location))
    seen: dict[str, str] = {}
    problems: list[str] = []
    for shard in index.shards:
        problems += check_shard(index, location, shard, seen)
        step(shard.samples)
    unknown = {path.name for path in location.glob("*.tar")} - {shard.name for shard in index.shards}
    return problems + [f"{name}: not in {shards.INDEX}" for name in sorted(unknown)]


def check_shard(index: Index, location: Path, shard: Shard, seen: dict[str, str]) -> list[str]:
    path = location / shard.name
    if not path.is_file():
        return [f"{shard.name}: missing"]
    if path.stat().st_size != shard.bytes:
        return [f"{shard.name}: {path.stat().st_size} bytes, {shards.INDEX} has {shard.bytes}"]
    with path.open("rb") as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256
    damage = [] if same else [f"{shard.name}: sha256 differs from {shards.INDEX}"]
    return damage + check_members(index, path, shard, seen)


def check_members(index: Index, path: Path, shard: Shard, seen: dict[str, str]) -> list[str]:
    """Problems inside a shard. It is read with Python's tarfile, independent of our own reader."""
    problems: list[str] = []
    found: dict[str, dict[str, bytes]] = {}
    starts: dict[str, int] = {}
    try:
        # Without ignore_zeros: data after the end mark is not read.
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                key, _, extension = info.name.partition(".")
                file = tar.extractfile(info)
                found.setdefault(key, {})[extension] = file.read() if file else b""
                starts.setdefault(key, info.offset)
    except (tarfile.TarError, OSError) as error:
        problems.append(f"{shard.name}: tar cannot be read to its end: {error}")
    for key, parts in found.items():
        where = f"{shard.name}: {key}"
        if key in seen:
            problems.append(f"{where}: the same key is in {seen[key]}")
        seen[key] = shard.name
        label = parts.get("cls")
        if label is None:
            problems.append(f"{where}: label is missing")
        elif not label.isdigit() or int(label) >= index.classes:
            problems.append(f"{where}: label {label[:20]!r} is not one of 0 to {index.classes - 1}")
        if "jpg" not in parts:
            problems.append(f"{where}: image is missing")
        else:
            try:
                images.size_of(parts["jpg"])
            except images.NotAnImage as error:
                problems.append(f"{where}: not an image ({error})")
    if len(found) != shard.samples:
        problems.append(f"{shard.name}: {len(found)} samples, {shards.INDEX} has {shard.samples}")
    try:
        if list(shards.load_offsets(index, shard).starts)[:-1] != sorted(starts.values()):
            problems.append(f"{path.with_suffix('.idx').name}: offsets differ from those in the shard")
    except DataError as error:
        problems.append(str(error))
    return problems[:LIMIT]
