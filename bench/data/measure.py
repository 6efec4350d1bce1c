"""Measure each stage of the input pipeline; compute the cores and drives that feed the GPUs of a cluster."""

from __future__ import annotations

import argparse
import json
import math
import os
from functools import partial
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from bench.results.runs import Run, load
from bench.sweep.launch import PYTHON
from bench.worker import shards, stages
from cluster.core import files, lock, ssh, worker_files
from cluster.core.errors import InfraError, UserError
from cluster.core.process import Lines, die_with_parent
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.core.tables import columns
from cluster.terraform import read_output


class Rate(TypedDict):
    stage: str
    images_per_second: float
    mb_per_second: float
    images_per_second_per_core: float
    cores: int
    note: str


class Backend(TypedDict):
    kind: str
    stages: list[Rate]
    pipeline: Rate


class Stages(TypedDict):
    """What bench/worker/stages.py prints."""

    cores: int
    image_bytes: float
    storage: Annotated[dict[str, Backend], Field(min_length=1)]
    core: list[Rate]


def command(args: argparse.Namespace) -> int:
    cores = args.cores or (2 if args.env is not None else len(os.sched_getaffinity(0)))
    run = load(args.run) if args.run else None
    wanted = need(args.rate, run)
    progress = Progress(stderr=True)

    with progress.phase("data bench", quiet=True):
        if args.env is not None:
            found = on_node(args.env, args.node, cores, args.seconds, args.locations, progress)
        else:
            with lock.measuring("local", progress.waiting):
                found = stages.measure(args.locations, cores, args.seconds, partial(progress.now, "stage"))
    answer = {**found, "need": feed(found, wanted) if wanted else None}
    if run is not None:
        write_capacities(run, found)
    print(json.dumps(answer, indent=1) if args.json else text(answer, run))
    return 0


def on_node(
    env: str, node: str | None, cores: int, seconds: float, locations: list[str], progress: Progress
) -> dict[str, Any]:
    """Measure on a node: only nodes reach the fabric. The default is the last one, which is not the head."""
    state = State.existing(env)
    if not state.tfstate.exists():
        raise UserError(f"--env: nothing is deployed in {env}; run `make deploy ENV={env}`")
    contract = read_output(state)
    names = [name for name, _ in contract.ordered()]
    place = node or names[-1]
    if place not in names:
        raise UserError(f"--node: {place} is not a node of {env}; choose one of {', '.join(names)}")
    words = [PYTHON, worker_files.folder(), "stages", str(cores), str(seconds), *locations]
    argv = ssh.as_training_account(contract, place, words)
    with state.locked(), lock.measuring(contract.provider, progress.waiting):
        progress.now("stage", f"copying the worker to {place}")
        worker_files.install(contract, [place])
        with Popen(argv, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, preexec_fn=die_with_parent) as process:
            out, err = Lines(process.stdout), Lines(process.stderr, partial(progress.now, "stage"))
            try:
                code = process.wait(120 + 20 * seconds * len(locations))
            except TimeoutExpired:
                process.kill()
                raise InfraError(f"{place}: timed out") from None
            # Read to the end before the pipes are closed.
            answer, problem = out.text(), err.text()
    if code:
        last = (problem.strip().splitlines() or ["no output"])[-1]
        raise (UserError if code == 2 else InfraError)(f"{place}: {last}")
    return {"node": place, **files.answer(answer, f"{place}: stages", Stages)}


def need(rate: float | None, run: Run | None) -> dict[str, Any] | None:
    """Images/s to feed: --rate, or the fastest point of a sweep on synthetic data."""
    if rate is not None:
        return {"images_per_second": rate, "source": "--rate"}
    if run is None:
        return None
    places = [place for place in run.table().points if place.family.data == "synthetic"]
    if not places:
        raise UserError(f"--run: {run.name} has no point on synthetic data to take a rate from; give --rate")
    best = max(places, key=lambda place: place.ips.median)
    source = f"{run.name}: {best.nodes} nodes, {best.fabric}, batch {best.batch}"
    return {"images_per_second": best.ips.median, "source": source}


def feed(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Cores and drives for the wanted rate: ceil(rate / measured rate of one)."""
    rate = wanted["images_per_second"]
    per_core = stage(found["core"], "batch (decode + augment)")["images_per_second_per_core"]
    return {
        **wanted,
        "cores": math.ceil(rate / per_core),
        "images_per_second_per_core": per_core,
        "drives": {
            location: math.ceil(rate / stage(backend["stages"], "read + tar parse")["images_per_second"])
            for location, backend in found["storage"].items()
        },
        "mb_per_second": rate * found["image_bytes"] / 1e6,
    }


def stage(rates: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(rate for rate in rates if rate["stage"] == name)


def write_capacities(run: Run, found: dict[str, Any]) -> None:
    """Save the rates for `bench explain`, which uses published figures otherwise."""
    location, backend = next(iter(found["storage"].items()))
    per_core = stage(found["core"], "batch (decode + augment)")["images_per_second_per_core"]
    how = f"bench data bench, {found['cores']} cores"
    read = stage(backend["stages"], "read + tar parse")["mb_per_second"]
    per = "server" if shards.is_url(location) else "node"
    storage = {"value": round(read, 1), "unit": "MB/s", "per": per, "source": "measured", "how": f"{how}: {location}"}
    rate = round(per_core * found["cores"], 1)
    decode = {"value": rate, "unit": "images/s", "per": "node", "source": "measured", "how": how}
    content = {**run.capacities, "storage": storage, "decode": decode}
    path = run.folder / "capacities.json"
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise InfraError(f"{path}: cannot write: {error.strerror}") from None


def text(answer: dict[str, Any], run: Run | None) -> str:
    head = ("stage", "images/s", "MB/s", "images/s per core")
    lines = [f"{answer['image_bytes'] / 1000:.0f} KB per image in the shards; MB/s is the output of the stage", ""]
    if "node" in answer:
        lines[0] = f"measured on {answer['node']}: {lines[0]}"

    def table(rates: list[dict[str, Any]]) -> str:
        names = [rate["stage"] + (f" ({rate['note']})" if rate["note"] else "") for rate in rates]
        fields = ("images_per_second", "mb_per_second", "images_per_second_per_core")
        numbers = [[f"{rate[field]:.0f}" for field in fields] for rate in rates]
        return columns(head, [(name, *row) for name, row in zip(names, numbers, strict=True)])

    for location, backend in answer["storage"].items():
        lines += [f"{location} ({backend['kind']})", table(backend["stages"]), ""]
    lines += ["one core, images in memory", table(answer["core"]), ""]
    lines += [f"whole pipeline on {answer['cores']} cores"]
    lines += [table([{**one["pipeline"], "stage": at} for at, one in answer["storage"].items()])]
    if answer["need"]:
        found = answer["need"]
        lines += ["", f"to feed {found['images_per_second']:.0f} images/s ({found['source']}):"]
        lines += [f"  {found['cores']} cores at {found['images_per_second_per_core']:.0f} images/s each"]
        lines += [f"  {count} drives or servers like {where}" for where, count in found["drives"].items()]
    else:
        lines += ["", "give --run or --rate to see how many cores and drives that rate needs"]
    if run is not None:
        lines += [f"{run.folder / 'capacities.json'} has these rates for `bench explain {run.folder}`"]
    return "\n".join(lines)
