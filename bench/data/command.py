"""Make, verify and copy data sets of tar shards; measure how fast they feed GPUs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from bench.parse import named_path
from bench.worker.shards import DataError
from cluster.core.errors import UserError
from cluster.core.numbers import POSITIVE, SECONDS, SEED, Number, Whole

# More decoding processes than any machine can start.
MOST_CORES = 1024
# A shard holds at least one image, and a file system at most 10 TB in one file.
SHARD_MB = Number(0.001, 1e7)


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser("make", help="make synthetic images with the sizes of ImageNet")
    make.add_argument("--images", type=Whole(1, 10**9), required=True, metavar="N", help="number of images")
    make.add_argument("--out", type=named_path, required=True, metavar="DIR", help="folder of the data set")
    make.add_argument("--seed", type=SEED, default=1, help="random seed of the images (default 1)")
    make.add_argument("--classes", type=Whole(2, 1000), default=1000, metavar="N", help="classes (default 1000)")
    make.add_argument("--shard-mb", type=SHARD_MB, default=1000, help="size of a shard in MB (default 1000)")
    shard = actions.add_parser("shard", help="pack an ImageNet folder tree into shards")
    shard.add_argument(
        "--imagenet", type=named_path, required=True, metavar="DIR", help="folder with train/<wnid>/ and val/"
    )
    text = "folder for the data sets train/ and val/"
    shard.add_argument("--out", type=named_path, required=True, metavar="DIR", help=text)
    shard.add_argument("--shard-mb", type=SHARD_MB, default=1000, help="size of a shard in MB (default 1000)")
    shard.add_argument("--seed", type=SEED, default=1, help="random seed of the image order (default 1)")
    text = "file with image and class per line, for a val/ without class folders"
    shard.add_argument("--val-labels", type=named_path, metavar="FILE", help=text)
    verify = actions.add_parser("verify", help="verify shards against their index and checksums")
    verify.add_argument("folder", type=named_path, metavar="DIR", help="data set: the folder with index.json")
    push = actions.add_parser("push", help="copy shards to the head node, which serves them over the fabric")
    push.add_argument("folder", type=named_path, metavar="DIR", help="data set: the folder with index.json")
    push.add_argument("--env", default="local", help="environment to copy to (default local)")
    push.add_argument("--name", help="name of the data set on the head (default: name of DIR)")
    measure = actions.add_parser("bench", help="measure each stage; compute the cores and drives that feed the GPUs")
    measure.add_argument("locations", nargs="+", metavar="DIR|URL", help="data sets on local disk, a share or HTTP")
    measure.add_argument("--env", help="environment to measure on (default: this machine)")
    measure.add_argument("--node", help="node of the environment (default: the last)")
    text = "number of cores (default: all of this machine, 2 on a node)"
    measure.add_argument("--cores", type=Whole(1, MOST_CORES), help=text)
    measure.add_argument("--seconds", type=SECONDS, default=3.0, help="time per stage (default 3)")
    measure.add_argument("--run", metavar="RUN", help="sweep to feed; the rates are saved for its `bench explain`")
    measure.add_argument("--rate", type=POSITIVE, metavar="N", help="images/s to feed, instead of the rate of RUN")
    for sub in (make, shard, verify, push, measure):
        sub.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    try:
        return ACTIONS[args.action](args)
    except DataError as error:
        raise UserError(str(error)) from None


@contextmanager
def counted(action: str, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows how many are done; yields the function that is called with the number of further ones."""
    from cluster.core.progress import Progress

    progress, done = Progress(stderr=True), 0

    def step(more: int) -> None:
        nonlocal done
        done += more
        progress.now(what, f"{done:,} of {total:,} {what}")

    with progress.phase(action, quiet=True):
        step(0)
        yield step


def make(args: argparse.Namespace) -> int:
    from bench.data import standin, writer

    per_shard = max(1, round(args.shard_mb * 1e6 / standin.MEAN_BYTES))
    facts = {
        "kind": "synthetic images with the sizes of ImageNet",
        # The version is part of the source, so that no shards of an older version are kept.
        "source": f"bench data make --images {args.images} --seed {args.seed} --classes {args.classes}"
        f" --shard-mb {args.shard_mb:g}, images of version {standin.VERSION}",
        "classes": args.classes,
    }

    def item(number: int) -> writer.Item:
        key, load = standin.key(number), partial(standin.image, args.seed, number, args.classes)
        return writer.Item(key, standin.label(args.seed, number, args.classes), load, key)

    groups = []
    for first in range(0, args.images, per_shard):
        numbers = range(first, min(first + per_shard, args.images))
        groups.append((f"synthetic-{first // per_shard:06d}.tar", [item(number) for number in numbers]))
    return build(args, [(writer.Folder(args.out, facts), groups)], lambda data: None)


def shard(args: argparse.Namespace) -> int:
    from bench.data import imagenet, writer

    names = imagenet.classes(args.imagenet)
    work = []
    for split in [name for name in ("train", "val") if (args.imagenet / name).is_dir()]:
        found = imagenet.items(args.imagenet, split, names, args.val_labels)
        facts = {
            "kind": "ImageNet",
            "source": f"{len(found)} images of {split}, --shard-mb {args.shard_mb:g} --seed {args.seed}",
            "classes": len(names),
            "class_names": names,
        }
        groups = imagenet.group(args.imagenet, found, split, args.shard_mb * 1e6, args.seed)
        work.append((split, facts, groups))
    folders = [(writer.Folder(args.out / split, facts), groups) for split, facts, groups in work]
    return build(args, folders, imagenet.check)


def build(args: argparse.Namespace, work: list[tuple[Any, Any]], check: Any) -> int:
    from bench.data import writer

    total = sum(len(items) for _, groups in work for _, items in groups)
    finished: list[writer.Finished] = []
    with counted(f"data {args.action}", "images", total) as step:
        for folder, groups in work:
            finished += writer.build(folder, groups, check, step)
    skipped = [entry for one in finished for entry in one.skipped]
    answer: dict[str, Any] = {
        "folders": [str(folder.path) for folder, _ in work],
        "samples": sum(one.samples for one in finished),
        "shards": len(finished),
        "bytes": sum(one.bytes for one in finished),
        "skipped": skipped,
    }
    if args.json:
        print(json.dumps(answer, indent=1))
        return 0
    print(f"{answer['samples']} images, {answer['bytes'] / 1e6:.0f} MB in {answer['shards']} shards: {args.out}")
    for entry in skipped[:20]:
        print(f"  skipped {entry['name']}: {entry['why']}")
    if skipped:
        print(f"{len(skipped)} bad images were skipped; index.json lists all of them")
    return 0


def verify(args: argparse.Namespace) -> int:
    from bench.data import checks
    from bench.worker import shards

    index = shards.load_index(str(args.folder))
    with counted("data verify", "samples", index.samples) as step:
        problems = checks.verify(args.folder, step)
    if args.json:
        print(json.dumps({"ok": not problems, "samples": index.samples, "problems": problems}, indent=1))
    else:
        summary = f"{len(index.shards)} shards, {index.samples} samples: {len(problems) or 'no'} problems"
        print(*problems, summary, sep="\n")
    return 1 if problems else 0


def push(args: argparse.Namespace) -> int:
    from bench.data import copying
    from cluster.core.progress import Progress

    progress = Progress(stderr=True)
    with progress.phase("data push", quiet=True):
        progress.now("copy", f"reading the settings of {args.env}")
        url = copying.push(args.folder, args.env, args.name or args.folder.resolve().name, progress)
    print(json.dumps({"data": f"shards:{url}"}) if args.json else f"line for a plan:  data: shards:{url}")
    return 0


def bench(args: argparse.Namespace) -> int:
    from bench.data import measure

    return measure.command(args)


ACTIONS = {"make": make, "shard": shard, "verify": verify, "push": push, "bench": bench}
