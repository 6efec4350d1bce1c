"""List an ImageNet folder tree for sharding: train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, or a flat val/ with labels."""

from __future__ import annotations

import random
import re
from pathlib import Path

from bench.data.writer import LONGEST_KEY, BadImage, Item, refuse_duplicates
from bench.worker import images
from bench.worker.shards import RECORD, padded
from cluster.core import files
from cluster.core.errors import UserError

SUFFIXES = {".jpeg", ".jpg"}
END_OF_IMAGE = b"\xff\xd9"


def classes(root: Path) -> list[str]:
    """Class folders of the training set in order. The position is the label, in val/ too."""
    train = root / "train"
    if not train.is_dir():
        raise UserError(f"--imagenet: {root} has no folder train; give the folder that contains train/ and val/")
    found = sorted(path.name for path in train.iterdir() if path.is_dir())
    if not found:
        raise UserError(f"--imagenet: {train} has no class folders such as n01440764/")
    return found


def items(root: Path, split: str, names: list[str], labels: Path | None = None) -> list[Item]:
    numbers = {name: number for number, name in enumerate(names)}
    found = []
    for path in sorted((root / split).iterdir()):
        if path.is_dir():
            if path.name not in numbers:
                raise UserError(f"--imagenet: {path} is not a class of train/")
            found += [item(root, image, path.name, numbers[path.name]) for image in images_in(path)]
    if flat := images_in(root / split):
        known = read_labels(labels, flat[0])
        for path in flat:
            name = known.get(path.stem)
            if name not in numbers:
                raise UserError(f"--val-labels: {path.name} has no class of train/")
            found.append(item(root, path, "", numbers[name]))
    refuse_duplicates(found)
    return found


def images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def read_labels(path: Path | None, example: Path) -> dict[str, str]:
    """Image and class per line, separated by space or comma: ILSVRC2012_val_00000001 n01751748."""
    if path is None:
        raise UserError(f"--val-labels: {example} is not in a class folder; give a file with image and class per line")
    lines = files.text(path, f"--val-labels: {path}").splitlines()
    words = [re.split(r"[,\s]+", line.strip()) for line in lines]
    return {Path(word[0]).stem: word[1] for word in words if len(word) > 1}


def item(root: Path, path: Path, wnid: str, number: int) -> Item:
    # A key must not contain a dot. The class makes it unique: two classes may have the same file name.
    stem = path.stem.replace(".", "_")
    key = stem if not wnid or stem.startswith(f"{wnid}_") else f"{wnid}_{stem}"
    if len(key.encode()) > LONGEST_KEY:
        raise UserError(f"{path}: the name has more than {LONGEST_KEY} bytes; rename the file")
    return Item(key, number, path.read_bytes, str(path.relative_to(root)))


def check(data: bytes) -> None:
    try:
        images.size_of(data)
    except images.NotAnImage as error:
        raise BadImage(str(error)) from None
    if END_OF_IMAGE not in data[-512:]:
        raise BadImage("the end of the image is missing")


def group(root: Path, found: list[Item], split: str, shard_bytes: float, seed: int) -> list[tuple[str, list[Item]]]:
    """Divide the items into shards of about that size. They are shuffled first: the tree is sorted by class."""
    shuffled = list(found)
    random.Random(f"{seed}/{split}").shuffle(shuffled)
    groups: list[list[Item]] = []
    size = shard_bytes
    for one in shuffled:
        if size >= shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += 3 * RECORD + padded((root / one.origin).stat().st_size)
    return [(f"{split}-{number:06d}.tar", group) for number, group in enumerate(groups)]
