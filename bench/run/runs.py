"""List, follow, cancel and fetch the runs of your own scripts."""

from __future__ import annotations

import argparse
import json
import os

from bench.run import command, nodes, outcome
from cluster.core.errors import UserError
from cluster.core.state import State
from cluster.terraform import read_output

COLUMNS = ("id", "state", "nodes", "engine", "command")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "logs", "cancel", "fetch"), default="list")
    parser.add_argument("id", nargs="?", metavar="ID", help="run, as `bench runs` lists it; latest: the last one")
    parser.add_argument("--env", default="local", help="environment (default local)")
    parser.add_argument("-f", "--follow", action="store_true", help="logs: print what the run writes until it ends")
    parser.add_argument("--all-ranks", action="store_true", help="logs: print all ranks, with their numbers")
    parser.add_argument("--json", action="store_true", help="list: print the records as JSON")


def run(args: argparse.Namespace) -> int:
    state = State.existing(args.env)
    contract = read_output(state)
    if args.action == "list":
        rows = nodes.listed(contract)
        if args.json:
            print(json.dumps(rows, indent=1))
        elif rows:
            command.show([{name: shown(row[name]) for name in COLUMNS} for row in rows])
        else:
            print("no runs yet; start one with `bench run -- python train.py`")
        return 0
    if not args.id:
        raise UserError(f"ID: missing; write `bench runs {args.action} ID`, or latest for the last run")
    found = nodes.find(contract, args.id)
    args.id = found["id"]
    local = command.folder_of(args.env, args.id)
    if args.action == "logs":
        nodes.follow(contract, args.id, every=args.all_ranks, own=False, wait=args.follow).wait()
        found = nodes.find(contract, args.id)
        if found["end"]:
            nodes.fetch(contract, args.id, local, command.RECORD)
            for line in outcome.explain(local, found, shown_rank=not args.all_ranks):
                print(line)
        return 1 if found["state"] in ("failed", "lost") else 0
    if args.action == "cancel":
        if found["state"] != "running":
            raise UserError(f"ID {args.id}: the run has ended ({found['state']})")
        if "pid" in found:
            raise UserError(f"ID {args.id}: somebody started it on the head; end it there with Ctrl-C")
        nodes.stop(contract, found["nodes"], args.id)
        print(f"run {args.id}: cancelled")
        return 0
    nodes.fetch(contract, args.id, local, (*command.RECORD, "out", "*/out"))
    wrote = local / ("*/out" if found["points"][0]["values"] else "out")
    print(f"run {args.id} is in {os.path.relpath(local)}; what it wrote is in {os.path.relpath(wrote)}")
    return 0


def shown(value: object) -> object:
    return len(value) if isinstance(value, list) else value
