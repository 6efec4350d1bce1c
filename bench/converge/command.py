"""Train a small network to a target accuracy with every engine, in the emulated time of a larger one."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.converge import plan as plans
from bench.converge.plan import Plan
from bench.parse import named_path
from bench.results import store
from bench.sweep.progress import console
from cluster import tuning
from cluster.core import lock
from cluster.core.contract import Contract
from cluster.core.errors import UserError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.terraform import read_output


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", default="local", help="environment to run on (default local)")
    parser.add_argument(
        "--plan",
        type=named_path,
        metavar="FILE",
        help="YAML file with the trainings (docs/parallel.md; default: its defaults)",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the trainings; run nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    if args.plan and not args.plan.is_file():
        raise UserError(f"--plan {args.plan}: no such file")
    plan, state = plans.load(args.plan), State.existing(args.env)
    if args.dry_run:
        contract = read_output(state) if state.tfstate.exists() else state.cluster().planned()
        plans.check(plan, contract)
        return dry_run(plan, contract, args.json)
    with state.locked():
        return measured(args, plan, read_output(state))


def dry_run(plan: Plan, contract: Contract, as_json: bool) -> int:
    found = [
        {
            **{name: getattr(curve, name) for name in ("engine", "fabric", "nodes", "batch")},
            **{"seeds": plan.seeds, "learning_rate": round(plans.learning_rate(plan, curve), 6)},
        }
        for curve in plans.curves(plan, contract)
    ]
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    for row in found:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    console.print(f"{len(found)} curves, {len(found) * plan.seeds} trainings")
    return 0


def measured(args: argparse.Namespace, plan: Plan, contract: Contract) -> int:
    from bench.converge import measure

    plans.check(plan, contract)
    progress = Progress(args.env, stderr=args.json)
    count, rows, begin = len(list(plans.curves(plan, contract))), list[dict[str, Any]](), datetime.now(UTC)
    folder = store.RESULTS / args.env / "converge" / f"{begin:%Y%m%d-%H%M%S}"
    try:
        with (
            progress.phase(f"converge: {count} curves, {plan.seeds} trainings each"),
            lock.measuring(contract.provider, progress.waiting),
        ):
            for more in measure.measure(plan, contract, tuning.load(args.env), progress):
                rows += more
                save(folder, described(args.env, plan, rows, count, begin))
    finally:
        # Also what was measured before an interruption or a failure.
        if rows:
            show(folder, described(args.env, plan, rows, count, begin), args.json)
    complete = len(rows) == count and all(len(row["runs"]) == plan.seeds for row in rows)
    return 0 if complete else 1


def described(env: str, plan: Plan, rows: list[dict[str, Any]], count: int, begin: datetime) -> dict[str, Any]:
    from bench.converge import analysis

    answers = analysis.answers(rows, plan.batch)
    if len(rows) < count:
        answers["problems"].insert(0, f"the measurement ended early: {len(rows)} of {count} curves are here")
    return {
        "created": begin.isoformat(timespec="seconds"),
        "took_s": round((datetime.now(UTC) - begin).total_seconds(), 1),
        "kind": "emulated",
        "env": env,
        "plan": plan.model_dump(),
        "curves": rows,
        "answers": answers,
    }


def save(folder: Path, result: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "result.json.part"
    part.write_text(json.dumps(result, indent=1))
    part.replace(folder / "result.json")


def show(folder: Path, result: dict[str, Any], as_json: bool) -> None:
    from bench.converge import report

    markdown = report.markdown_page(result)
    (folder / "report.md").write_text(markdown)
    (folder / "report.html").write_text(report.page(result))
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        console.print(markdown, markup=False)
        console.print(f"saved in {folder}", markup=False)
