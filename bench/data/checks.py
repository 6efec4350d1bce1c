"""Hold a folder of shards against its index: sizes, checksums, tar headers, keys, labels, images."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path

from bench.worker import images, shards
from bench.worker.shards import DataError, Index, Shard

MOST = 100


def verify(location: Path, step: Callable[[int], None]) -> list[str]:
    """What is wrong, one line each; empty when all is well."""
    index = shards.load_index(str(location))
    seen: dict[str, str] = {}
    problems: list[str] = []
    for shard in index.shards:
        problems += one(index, location, shard, seen)
        step(shard.samples)
    known = {shard.name for shard in index.shards}
    problems += [
        f"{path.name}: not in {shards.INDEX}" for path in sorted(location.glob("*.tar")) if path.name not in known
    ]
    return problems


def one(index: Index, location: Path, shard: Shard, seen: dict[str, str]) -> list[str]:
    path = location / shard.name
    if not path.is_file():
        return [f"{shard.name}: missing"]
    if path.stat().st_size != shard.bytes:
        return [f"{shard.name}: {path.stat().st_size} bytes, {shards.INDEX} says {shard.bytes}"]
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
            return [f"{shard.name}: sha256 differs from {shards.INDEX}", *members(index, path, shard, seen)]
    return members(index, path, shard, seen)


def members(index: Index, path: Path, shard: Shard, seen: dict[str, str]) -> list[str]:
    """What is wrong inside a shard, read with Python's own tar reader, not with ours."""
    problems: list[str] = []
    found: dict[str, dict[str, bytes]] = {}
    starts: dict[str, int] = {}
    try:
        # ignore_zeros off: data behind the end mark is not read.
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                key, _, extension = info.name.partition(".")
                file = tar.extractfile(info)
                found.setdefault(key, {})[extension] = file.read() if file else b""
                starts.setdefault(key, info.offset)
    except (tarfile.TarError, OSError) as error:
        problems.append(f"{shard.name}: not a tar that can be read to its end: {error}")
    for key, parts in found.items():
        where = f"{shard.name}: {key}"
        if key in seen:
            problems.append(f"{where}: this key is in {seen[key]} too")
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
        problems.append(f"{shard.name}: {len(found)} samples, {shards.INDEX} says {shard.samples}")
    try:
        if list(shards.load_places(index, shard).starts)[:-1] != sorted(starts.values()):
            problems.append(f"{path.with_suffix('.idx').name}: samples begin elsewhere in the shard")
    except DataError as error:
        problems.append(str(error))
    return problems[:MOST]
