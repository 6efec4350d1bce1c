"""Find the settings with which training steps are fastest on a fabric, and keep them when they are really better.

Successive halving: many candidates are measured briefly, the better half longer, and so on within the time budget. The
objective is the sweep's own step. What is in force takes part in every round, and only a winner whose interval lies
wholly below its is written to inventories/<env>/tuning.yml, which the mpi and horovod roles apply.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from bench.comm.measure import START_LIMIT, Case, Communication, sizes
from bench.plan import check, unfold
from bench.plan.schema import Plan
from bench.sweep import record, spec
from bench.sweep.progress import console
from bench.worker import step_statistics
from bench.worker.protocol import Spec, TrialDone
from cluster import lifecycle, tuning
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.state import State
from cluster.terraform import read_output
from cluster.tuning import Tuning

FIRST_SECONDS = 4.0
ROUNDS = 3
Measure = Callable[[Tuning, float], list[float]]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", default="local", help="environment to tune (default local)")
    parser.add_argument("--fabric", help="fabric of cluster.yml (default: the active one)")
    parser.add_argument("--minutes", type=float, default=5.0, help="time budget (default 5)")
    parser.add_argument("--model", default="resnet50", help="model whose step is the objective (default resnet50)")
    parser.add_argument("--batch", type=int, default=64, help="images per GPU and step (default 64)")
    parser.add_argument("--device", default="emulated:p100", help="as in plans (default emulated:p100)")
    parser.add_argument("--explain", action="store_true", help="say which settings mattered")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def candidates() -> Iterator[Tuning]:
    """The most different ones first: what the budget does not reach is what differs least."""
    for cycle, fusion in product((2.0, 5.0, 1.0, 10.0), (128.0, 32.0)):
        yield Tuning(engine="horovod-gloo", cycle_ms=cycle, fusion_mb=fusion)
    for algorithm in ("ring", "segmented_ring", "rabenseifner"):
        segment = (1 << 20) if algorithm == "segmented_ring" else 0
        yield Tuning(engine="horovod-mpi", algorithm=algorithm, segment_bytes=segment)
    yield Tuning(engine="horovod-mpi", eager_bytes=1 << 18)
    yield Tuning(engine="horovod-mpi", links=2)
    yield Tuning(engine="horovod-mpi", socket_bytes=1 << 20)
    yield Tuning(engine="horovod-mpi", cycle_ms=1.0)


@dataclass
class Seen:
    """All that was measured of one candidate."""

    settings: Tuning
    steps: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.steps) if self.steps else float("inf")

    @property
    def interval(self) -> tuple[float, float]:
        return step_statistics.median_interval(self.steps)


def better(one: Seen, other: Seen) -> bool:
    """Significantly: the intervals of the two medians do not touch."""
    return bool(one.steps and other.steps) and one.interval[1] < other.interval[0]


def search(
    incumbent: Tuning, baseline: Tuning, measure: Measure, left: Callable[[], float], say: Callable[[str], None]
) -> tuple[Seen, Seen, Seen, list[Seen]]:
    """The winner, what is in force, the untuned defaults, and everything that was seen. left() is the budget in s."""
    fixed = {key: Seen(value) for key, value in (("now", incumbent), ("defaults", baseline))}
    if incumbent == baseline:
        fixed["defaults"] = fixed["now"]
    others = [Seen(one) for one in candidates() if one not in (incumbent, baseline)]
    everything = list({id(one): one for one in fixed.values()}.values()) + others
    running, seconds = everything, FIRST_SECONDS
    for number in range(ROUNDS):
        for one in running:
            if left() <= 0 and one not in fixed.values():
                break
            begin = time.monotonic()
            try:
                one.steps += measure(one.settings, seconds)
            except InfraError as error:
                one.problem = str(error)
            say(f"round {number + 1}: {describe(one)} ({time.monotonic() - begin:.0f} s)")
        alive = sorted((one for one in running if one.steps), key=lambda one: one.median)
        if not alive:
            raise InfraError("tune: nothing could be measured; run `make doctor`")
        keep = max(2, len(alive) // 3)
        running = alive[:keep] + [one for one in fixed.values() if one not in alive[:keep]]
        running = list({id(one): one for one in running}.values())
        seconds *= 2
    winner = min((one for one in everything if one.steps), key=lambda one: one.median)
    return winner, fixed["now"], fixed["defaults"], everything


def small_below(contract: Contract, fabric: str, chosen: Tuning) -> int:
    """From which size on the chosen settings beat the defaults. Not scaled: latency does not shrink with s."""
    cases = [Case("all_reduce", size) for size in sizes(64 << 10, 16 << 20)]
    work = Communication(contract, fabric, len(contract.nodes), factor=1.0)
    try:
        defaults, ours = (work.times(one.engine, one, cases, FIRST_SECONDS / 4) for one in (tuning.UNTUNED, chosen))
    finally:
        work.close()
    for case in cases:
        if statistics.median(ours[case.id].times) < statistics.median(defaults[case.id].times):
            return case.size
    return cases[-1].size


def describe(one: Seen) -> str:
    given = one.settings
    words: list[str] = [given.engine]
    if given.engine == "horovod-mpi":
        words += [given.algorithm, f"eager {given.eager_bytes >> 10}K", f"links {given.links}"]
        words += [f"segment {given.segment_bytes >> 10}K"] if given.segment_bytes else []
        words += [f"sockets {given.socket_bytes >> 10}K"] if given.socket_bytes else []
    words += [f"cycle {given.cycle_ms:g} ms", f"fusion {given.fusion_mb:g} MB"]
    if one.problem:
        return f"{', '.join(words)}: failed: {one.problem}"
    if not one.steps:
        return f"{', '.join(words)}: not reached"
    low, high = one.interval
    return f"{', '.join(words)}: {1e3 * one.median:.0f} ms ({1e3 * low:.0f}-{1e3 * high:.0f})"


def what_mattered(seen: list[Seen]) -> list[dict[str, Any]]:
    """Per setting: the fastest candidate with each of its values, and how far apart those are.

    Values of a setting are compared within one engine, since most mean something to one of them only.
    """
    rows: list[dict[str, Any]] = []
    engines = sorted({one.settings.engine for one in seen})
    for name, engine in [("engine", None), *product(Tuning.model_fields.keys() - {"engine"}, engines)]:
        best: dict[str, float] = {}
        for one in seen:
            if one.steps and engine in (None, one.settings.engine):
                value = str(getattr(one.settings, name))
                best[value] = min(best.get(value, float("inf")), one.median)
        if len(best) > 1:
            label = f"{name} with {engine}" if engine else name
            matters = max(best.values()) / min(best.values()) - 1
            rows.append({"setting": label, "best_ms": {k: 1e3 * v for k, v in best.items()}, "matters": matters})
    return sorted(rows, key=lambda row: -row["matters"])


def write(path: Path, fabric: str, settings: Tuning) -> None:
    """All at once: whoever is interrupted here leaves what was in force."""
    content = yaml.safe_load(path.read_text()) if path.exists() else {"tuning": {}}
    content["tuning"][fabric] = settings.model_dump()
    new = path.with_suffix(".new")
    new.write_text(
        "# Written by `make tune`; remove a fabric to go back to what is shipped.\n" + yaml.safe_dump(content)
    )
    new.replace(path)


class Steps:
    """Measures a training step with given settings, as the sweep does."""

    def __init__(self, contract: Contract, plan: Plan) -> None:
        self.plan, self.work = plan, Communication(contract, plan.fabrics[0], plan.nodes[0])
        self.group = next(unfold.points(plan, contract))
        self.shaped = contract.fabrics[contract.active_fabric].shaped

    def __call__(self, settings: Tuning, seconds: float, engine: str = "") -> list[float]:
        plan = self.plan.model_copy(update={"seconds": seconds})
        group = replace(self.group, engine=engine or settings.engine)
        scaling = spec.Scaling(self.work.scale if spec.emulated(plan) else 1.0)
        launch_spec = spec.launch_spec(plan, group, self.shaped, scaling, check=False)
        whole = Spec([launch_spec], spec.gradients(plan, plan.models))
        launch = self.work.launch(group.engine, settings, whole, "trials")
        for event in self.work.events(launch, START_LIMIT + 6 * seconds):
            if isinstance(event, TrialDone):
                return record.slowest(event.ranks, record.total)
        raise InfraError("the worker ended early")


def run(args: argparse.Namespace) -> int:
    state = State(args.env)
    contract = read_output(state)
    fabric = args.fabric or contract.active_fabric
    if fabric not in contract.fabrics:
        raise UserError(f"--fabric {fabric}: unknown; choose one of {', '.join(contract.fabrics)}")
    if len(contract.nodes) < 2:
        raise UserError("tune: one node has no network to tune; run `make scale NODES=4`")
    if args.minutes <= 0:
        raise UserError(f"--minutes {args.minutes:g}: must be more than 0")
    wanted = Plan(
        nodes=[len(contract.nodes)], batches=[args.batch], fabrics=[fabric], models=[args.model], device=args.device
    )
    check.check(wanted, contract, len(contract.nodes), max(node.gpus for node in contract.nodes.values()))
    before = tuning.choose(tuning.load(args.env), fabric, contract.fabrics[fabric])
    deadline = time.monotonic() + 60 * args.minutes
    measure = Steps(contract, wanted)

    def say(text: str) -> None:
        if not args.json:
            console.print(text, markup=False)

    try:
        found = search(before, tuning.UNTUNED, measure, lambda: deadline - time.monotonic(), say)
    finally:
        measure.work.close()
    winner, now, defaults, everything = found
    kept = winner is not now and better(winner, now)
    if kept:
        below = small_below(contract, fabric, winner.settings)
        say(f"messages below {below >> 10} KB are faster by Horovod's and OpenMPI's own defaults")
        with state.locked():
            chosen = winner.settings.model_copy(update={"small_below_bytes": below})
            write(tuning.file(args.env), fabric, chosen)
            if fabric == contract.active_fabric:
                lifecycle.playbook(state, "site.yml")
    report(args, fabric, winner if kept else now, now, defaults, everything, kept)
    return 0


def report(
    args: argparse.Namespace, fabric: str, chosen: Seen, now: Seen, defaults: Seen, seen: list[Seen], kept: bool
) -> None:
    rows = {"defaults": defaults, "before": now, "after": chosen}
    if args.json:
        result = {
            **{"fabric": fabric, "kept": kept, "mattered": what_mattered(seen)},
            **{name: {"settings": one.settings.model_dump(), "steps_s": one.steps} for name, one in rows.items()},
        }
        print(json.dumps(result, indent=1))
        return
    emulated = "EMULATED " if args.device.startswith("emulated:") else ""
    table = Table(title=f"{emulated}step on {fabric}, {args.model}, batch {args.batch}", title_justify="left")
    for column in ("", "step ms", "95%", "images/s against defaults", "settings"):
        table.add_column(column)
    for name, one in rows.items():
        low, high = one.interval
        gain = defaults.median / one.median
        words = describe(one).partition(": ")[0]
        table.add_row(name, f"{1e3 * one.median:.0f}", f"{1e3 * low:.0f}-{1e3 * high:.0f}", f"x{gain:.2f}", words)
    console.print(table)
    if kept:
        console.print(f"kept in {tuning.file(args.env)}", markup=False)
    else:
        console.print("nothing was significantly better than what is in force: nothing changed", markup=False)
    if args.explain:
        for row in what_mattered(seen):
            values = ", ".join(f"{value}: {ms:.0f} ms" for value, ms in row["best_ms"].items())
            console.print(
                f"{row['setting']}: {row['matters']:.0%} between best and worst value ({values})", markup=False
            )
