"""Run a plan: every combination of nodes, fabrics and batches, measured on the cluster."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from contextlib import nullcontext, redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.plan import check, fit, schema, unfold
from bench.plan.schema import Plan
from bench.report import command as report
from bench.results import dimensions
from bench.results.trial import Point
from bench.sweep import efa, evidence, executors, monitoring, publish, run_folder, summary
from bench.sweep.progress import console, lines_on_stderr
from bench.sweep.runner import Sweep
from cluster import lifecycle, tuning
from cluster.core import config, worker_files
from cluster.core.contract import Contract
from cluster.core.errors import UserError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.terraform import read_output
from cluster.tuning import Tuning


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", default="local", help="environment to run on (default local)")
    parser.add_argument("--plan", help=f"{', '.join(schema.names())}, or a file (default: one that fits the cluster)")
    parser.add_argument("--run", help="name of the results folder (default: name of the plan); a rerun completes it")
    parser.add_argument("--fresh", action="store_true", help="measure all points again, into a new folder")
    parser.add_argument("--dry-run", action="store_true", help="list the trials with their estimated time; run nothing")
    parser.add_argument("--no-check", action="store_true", help="skip re-running each point at twice the scale factor")
    parser.add_argument("--timeline", action="store_true", help="also record Horovod's timeline of the last point")
    parser.add_argument("--json", action="store_true", help="print the trials as JSON at the end")


def run(args: argparse.Namespace) -> int:
    if args.run is not None:
        run_folder.check_name(args.run)
    if args.plan is not None:
        schema.find(args.plan)
    state = State.existing(args.env)
    if args.dry_run:
        contract = read_output(state) if state.tfstate.exists() else state.cluster().planned()
        return dry_run(plan_for(args, contract, state), contract, tuning.load(args.env), args.json)
    with state.locked(), lines_on_stderr() if args.json else nullcontext():
        return measure(args, state)


def plan_for(args: argparse.Namespace, contract: Contract, state: State) -> Plan:
    """The plan that was asked for, or one that fits the cluster, checked against what is there or would be."""
    cluster = state.cluster()
    args.plan = args.plan or fit.plan_name(contract)
    plan = fit.load(args.plan, contract)
    scalable = cluster.most_nodes() - len(contract.nodes) + len(contract.compute)
    check.check(plan, contract, executors.size(contract, cluster) if state.tfstate.exists() else scalable)
    return plan


def measure(args: argparse.Namespace, state: State) -> int:
    cluster = state.cluster()
    if args.plan is None:
        args.plan = fit.plan_name(read_output(state) if state.tfstate.exists() else cluster.planned())
        console.print(f"plan {args.plan}: fits ENV={args.env}; PLAN= chooses another")
    name = args.run or Path(args.plan).stem
    run_folder.check_name(name)
    if not state.tfstate.exists():
        plan = plan_for(args, cluster.planned(), state)
        if not args.fresh:
            run_folder.open_run(args.env, name, plan)
        idle = cluster.nodes - len(cluster.planned().compute)
        nodes = max(cluster.nodes, idle + max(plan.nodes))
        console.print(f"nothing is deployed; deploying {nodes} nodes first")
        with redirect_stdout(sys.stderr) if args.json else nullcontext():
            lifecycle.deploy(args.env, nodes, False)
    contract = read_output(state)
    plan = plan_for(args, contract, state)
    executor = executors.make(contract, args.env)
    contract = executor.contract
    if args.timeline and not executor.has_nodes:
        raise UserError(f"--timeline: the nodes of executor {contract.executor} cannot be read; remove it")
    efa.require(contract, plan.fabrics, contract.compute[: max(plan.nodes)], plan.device == "cuda")
    name = args.run or name + executor.suffix
    if args.fresh:
        name += datetime.now(UTC).strftime("-%Y%m%d-%H%M%S")
    folder = run_folder.open_run(args.env, name, plan)
    folder.prepare(plan.model_dump(), provenance(args.env, contract))
    for problem in folder.problems():
        console.print(problem)
    sweep = Sweep(plan, folder, executor, tuning.load(args.env), evidence.read(state), check=not args.no_check)
    before, begin = len(folder.trials()), time.monotonic()
    spent = sweep.run()
    if cluster.features.monitoring and executor.has_nodes and len(folder.trials()) > before:
        monitoring.save(contract, folder, begin, time.monotonic())
    if args.timeline:
        sweep.capture_timeline()
    if cluster.features.jupyterlab and contract.storage.backend != "none" and folder.trials():
        publish.to_share(contract, folder)
    ids = [point.id for group in sweep.groups for point in group.points]
    latest = {trial.id: trial for trial in folder.trials()}
    trials = [latest[identifier] for identifier in ids if identifier in latest]
    if args.json:
        print(json.dumps([trial.model_dump() for trial in trials], indent=1))
    else:
        summary.show(trials, plan, spent, folder)
        report.run(argparse.Namespace(run=[str(folder.folder)], example=False, out=None, plots=None, json=False))
    return 0 if all(trial.status == "ok" for trial in trials) else 1


def dry_run(plan: Plan, contract: Contract | None, tuned: dict[str, Tuning], as_json: bool) -> int:
    points: list[Point] = []
    seconds: dict[str, float] = {}
    progress = Progress(stderr=True)
    with progress.phase("dry run", quiet=True):
        for group in unfold.points(plan, contract, tuned):
            seconds |= unfold.estimate(plan, [group])
            points += group.points
            progress.now("trials", f"{len(points)} trials")
    total = sum(seconds.values())
    rows = [{**point.model_dump(), "estimated_seconds": round(seconds[point.id], 1)} for point in points]
    if as_json:
        print(json.dumps({"trials": rows, "estimated_seconds": round(total)}, indent=1))
        return 0
    always = ("engine", "fabric", "nodes", "model", "batch", "compression")
    columns = (*always, *dimensions.varying(points, without=always), "estimated_seconds")
    # Not a rich table: that takes half a minute for 50,000 rows.
    lines = [columns, *(tuple(str(row[column]) for column in columns) for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    console.print(f"{len(rows)} trials, about {total / 60:.1f} minutes")
    return 0


def provenance(env: str, contract: Contract) -> dict[str, Any]:
    git = ["git", "-C", str(config.ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "env": env,
        "git_commit": commit,
        "versions": config.versions(),
        "kernel": platform.release(),
        "nodes": {name: node.model_dump() for name, node in contract.ordered()},
        "fabrics": {name: fabric.model_dump() for name, fabric in contract.fabrics.items()},
        "cluster": State(env).cluster().model_dump(mode="json"),
        "worker": worker_files.digest(),
    }
