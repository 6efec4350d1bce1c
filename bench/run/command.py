"""Run your own script on the nodes, with the launcher, network and settings that a sweep would use."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.results import store
from bench.run import nodes, outcome, request, source
from bench.run.request import Request
from bench.sweep import foreign
from bench.sweep.progress import console
from cluster import lifecycle, tuning
from cluster.core import files, lock, ssh
from cluster.core.config import MAX_NODES
from cluster.core.contract import Contract
from cluster.core.errors import InfraError
from cluster.core.numbers import Whole
from cluster.core.process import hide_in_process_list
from cluster.core.state import State
from cluster.terraform import read_output

# Fetched at the end of every run; outputs only by `bench runs fetch`.
RECORD = ("run.json", "end.json", "state.json", "logs", "*/state.json", "*/logs", "*/out/result.json")


def configure(parser: argparse.ArgumentParser) -> None:
    text = "environment to run on (default local); with NAME=VALUE, a variable of the script, kept out of every log"
    parser.add_argument("--env", action="append", default=[], metavar="ENV|NAME=VALUE", help=text)
    parser.add_argument("--nodes", type=Whole(1, MAX_NODES), help="number of nodes (default: all)")
    text = "go on while so many nodes are left, when others fail, hang or are taken away (Horovod Elastic)"
    parser.add_argument("--min-nodes", type=Whole(1, MAX_NODES), metavar="N", help=text)
    text = "most nodes of an elastic run (default: all); the others are spares"
    parser.add_argument("--max-nodes", type=Whole(1, MAX_NODES), metavar="N", help=text)
    text = "processes per node (default: one per GPU, or one)"
    parser.add_argument("--gpus-per-node", type=Whole(1, 64), help=text)
    text = "horovod: horovodrun or mpirun; ddp: torchrun (default horovod)"
    parser.add_argument("--engine", choices=("horovod", "ddp"), default="horovod", help=text)
    parser.add_argument("--folder", default=".", help="folder to copy and run in (default: the current one)")
    text = "install the packages of this file on the share first, once per file"
    parser.add_argument("--requirements", metavar="FILE", help=text)
    parser.add_argument("--container", metavar="IMAGE", help="run inside this container image")
    text = "start again after a failure, at most N times (default 0)"
    parser.add_argument("--max-restarts", type=Whole(0, 1000), default=0, metavar="N", help=text)
    text = "start with a copy of what this run wrote, such as its checkpoint; latest: the last run"
    parser.add_argument("--resume", metavar="ID", help=text)
    parser.add_argument("--detach", action="store_true", help="return at once; the head supervises the run")
    parser.add_argument("--all-ranks", action="store_true", help="print the output of all ranks, with their numbers")
    parser.add_argument("--print", action="store_true", help="print the command to type on the head; run nothing")
    text = "an option of the script and its values: one run per combination; repeatable"
    parser.add_argument("--grid", action="append", metavar="NAME=A,B,...", help=text)
    parser.add_argument(
        "--each-nodes", type=Whole(1, MAX_NODES), metavar="N", help="nodes per run of a grid (default 1)"
    )
    text = "at the end, also after a failure: stop the nodes, or destroy the cluster"
    parser.add_argument("--then", choices=("stop", "destroy"), help=text)
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="such as python train.py --lr 0.1"
    )


def run(args: argparse.Namespace) -> int:
    env, variables = request.split_env(args.env)
    hide_in_process_list(list(variables.values()))
    state = State.existing(env)
    contract = read_output(state)
    asked = request.make(args, contract, variables)
    request.check_spot(args.then, state.cluster())
    tuned = tuning.load(env)
    if args.print:
        for line in request.printed(asked, contract, tuned):
            print(line)
        return 0
    with state.locked(), lock.disturbing(contract.provider, lock.on_stderr):
        try:
            code = carry_out(args, env, state, contract, asked)
        except InfraError as error:
            if args.then != "destroy":
                raise
            kept = f"the cluster is kept, because the outputs are not here: `make destroy ENV={env}` ends the bill"
            raise InfraError(f"{error}; {kept}") from None
    # Outside: it takes the lock itself.
    if args.then == "destroy":
        lifecycle.destroy(env, yes=True)
    return code


def carry_out(args: argparse.Namespace, env: str, state: State, contract: Contract, asked: Request) -> int:
    chosen = list(source.to_copy(asked.folder))
    if (size := source.size(asked.folder, chosen)) > source.WARN_BYTES:
        text = f"copying {size / 1e6:.0f} MB from {asked.folder}; name what the run does not need in .runignore"
        print(text, file=sys.stderr)
    for link, target in source.links_out(asked.folder, chosen, contract.storage.path)[:3]:
        text = f"{link} leads to {target}, which the nodes do not have"
        print(f"{text}; copy that with `make put`, or name the link in .runignore", file=sys.stderr)
    online = check_online(contract, asked, env)
    foreign.refuse_run_on_head(contract)
    if asked.resume:
        asked = replace(asked, resume=nodes.find(contract, asked.resume, "--resume")["id"])
    venv = None
    if asked.requirements:
        print(f"packages of {args.requirements}: looking on the share", file=sys.stderr, flush=True)
        venv = nodes.packages(contract, asked.requirements)
    record = request.record(asked, contract, tuning.load(env), venv)
    nodes.copy(contract, asked, record, chosen)
    local = folder_of(env, asked.id)
    local.mkdir(parents=True)
    state.mark_run(asked.id, ssh.argv(contract, contract.head, f"systemctl is-active run-{asked.id}-launch"))
    nodes.start(contract, asked, online)
    print(f"run {asked.id} on {', '.join(online)}", file=sys.stderr, flush=True)
    if args.detach:
        suffix = "" if env == "local" else f" --env {env}"
        print(f"follow it: bench runs logs {asked.id} -f{suffix}", file=sys.stderr)
        return 0
    begin = time.monotonic()
    code = follow(contract, asked, every=args.all_ranks)
    state.unmark_run()
    if code and ssh.offline(contract, [contract.head]):
        # What the others still run would wait for the head.
        nodes.stop(contract, [name for name in contract.nodes if name != contract.head], asked.id)
        raise InfraError(f"run {asked.id}: ended, because node {contract.head} is lost; run `make deploy ENV={env}`")
    if code:
        # The run ends with its standard input. This waits until it has ended.
        nodes.stop(contract, asked.nodes, asked.id)
        print(f"the connection to {contract.head} broke, which ends the run; with --detach it goes on", file=sys.stderr)
    return conclude(contract, asked.id, local, time.monotonic() - begin, args)


def check_online(contract: Contract, asked: Request, env: str) -> list[str]:
    """The nodes to start on: all of them, or those of an elastic run that answer."""
    offline = ssh.offline(contract, dict.fromkeys([contract.head, *asked.nodes]))
    online = [node for node in asked.nodes if node not in offline]
    if offline and (not asked.elastic or contract.head in offline or len(online) < asked.elastic.start):
        raise InfraError(f"node {offline[0]} does not answer; run `make status ENV={env}`")
    return online


def follow(contract: Contract, asked: Request, every: bool) -> int:
    """Print the output until the run ends, and return 0, or until the head is lost.

    Whatever ends us ends the run: first by us, or else by its closed input.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    process = nodes.follow(contract, asked.id, every=every, own=True)
    try:
        return process.wait()
    except BaseException:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        print("ending the run on all nodes", file=sys.stderr, flush=True)
        nodes.stop(contract, asked.nodes, asked.id)
        process.kill()
        raise


def folder_of(env: str, run: str) -> Path:
    return store.RESULTS / env / "runs" / run


def conclude(contract: Contract, run: str, local: Path, seconds: float, args: argparse.Namespace) -> int:
    """Fetch the records, and say how the run ended."""
    parts = [*RECORD, "out", "*/out"] if getattr(args, "then", None) == "destroy" else RECORD
    nodes.fetch(contract, run, local, parts)
    record = store_record(local)
    end = record["end"]
    if not end:
        raise InfraError(f"run {run}: the head lost it; its logs are in {local}")
    if len(record["points"]) > 1 or record["points"][0]["values"]:
        show(outcome.summary(local, record))
    for line in outcome.explain(local, record, shown_rank=not args.all_ranks):
        print(line, file=sys.stderr)
    print(f"run {run}: {end['state']} after {seconds:.0f} s; logs in {os.path.relpath(local)}", file=sys.stderr)
    return 0 if end["state"] == "ok" else 1


def store_record(local: Path) -> dict[str, Any]:
    end = local / "end.json"
    return files.mapping(local / "run.json") | {"end": files.mapping(end) if end.exists() else None}


def show(rows: list[dict[str, Any]]) -> None:
    names = outcome.columns(rows)
    table = Table(*names)
    for row in rows:
        table.add_row(*("" if row.get(name) is None else f"{row[name]}" for name in names))
    console.print(table)
