"""Find the settings with the fastest training step on a fabric, and save them if they are significantly better.

Successive halving: many candidates are measured briefly, the best third for longer, and so on within the time budget.
The objective is the step time of a sweep. The current settings take part in every round. A winner is written to
inventories/<env>/tuning.yml, which the mpi and horovod roles apply, only if its whole interval is below theirs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
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
from cluster.core import files, lock
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.numbers import MINUTES, Whole
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.terraform import read_output
from cluster.tuning import Tuning

FIRST_SECONDS = 4.0
ROUNDS = 3
Measure = Callable[[Tuning, float], list[float]]
MEDIAN = attrgetter("median")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", default="local", help="environment to tune (default local)")
    parser.add_argument("--fabric", help="fabric of cluster.yml (default: the active one)")
    parser.add_argument("--minutes", type=MINUTES, default=5.0, help="time budget (default 5)")
    parser.add_argument("--model", default="resnet50", help="model whose step is the objective (default resnet50)")
    parser.add_argument("--batch", type=Whole(1, 4096), default=64, help="images per GPU and step (default 64)")
    parser.add_argument("--device", default="emulated:p100", help="device, as in a plan (default emulated:p100)")
    parser.add_argument("--explain", action="store_true", help="show how much each setting matters")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def candidates() -> Iterator[Tuning]:
    """The most different candidates first: the budget may not reach the last ones."""
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
class Candidate:
    """Settings and all steps measured with them."""

    settings: Tuning
    steps: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.steps) if self.steps else float("inf")

    @property
    def interval(self) -> tuple[float, float]:
        return step_statistics.median_interval(self.steps)


@dataclass(frozen=True)
class Result:
    winner: Candidate
    current: Candidate
    defaults: Candidate
    candidates: list[Candidate]

    @property
    def improved(self) -> bool:
        """Whether the winner is significantly faster: the intervals of the two medians do not overlap."""
        return self.winner is not self.current and better(self.winner, self.current)


def better(candidate: Candidate, other: Candidate) -> bool:
    return bool(candidate.steps and other.steps) and candidate.interval[1] < other.interval[0]


def search(
    incumbent: Tuning,
    baseline: Tuning,
    measure: Measure,
    remaining: Callable[[], float],
    log: Callable[[str], None],
    now: Callable[[str], None] = lambda text: None,
) -> Result:
    """remaining() is the rest of the time budget in seconds. The incumbent and the baseline are always measured."""
    current = Candidate(incumbent)
    fixed = [current] if incumbent == baseline else [current, Candidate(baseline)]
    everything = fixed + [Candidate(settings) for settings in candidates() if settings not in (incumbent, baseline)]
    running, seconds = everything, FIRST_SECONDS
    for number in range(ROUNDS):
        for candidate in running:
            if remaining() <= 0 and candidate not in fixed:
                break
            begin = time.monotonic()
            now(f"round {number + 1} of {ROUNDS}: {describe(candidate)}")
            try:
                candidate.steps += measure(candidate.settings, seconds)
            except InfraError as error:
                candidate.problem = str(error)
            log(f"round {number + 1}: {describe(candidate)} ({time.monotonic() - begin:.0f} s)")
        alive = sorted((candidate for candidate in running if candidate.steps), key=MEDIAN)
        if not alive:
            raise InfraError("tune: no candidate could be measured; run `make doctor`")
        best = alive[: max(2, len(alive) // 3)]
        running = best + [candidate for candidate in fixed if candidate not in best]
        seconds *= 2
    winner = min((candidate for candidate in everything if candidate.steps), key=MEDIAN)
    return Result(winner, current, fixed[-1], everything)


def small_below(contract: Contract, fabric: str, chosen: Tuning, progress: Progress) -> int:
    """The smallest size at which the chosen settings beat the defaults. Not scaled: latency does not shrink."""
    cases = [Case("all_reduce", size) for size in sizes(64 << 10, 16 << 20)]
    work = Communication(contract, fabric, len(contract.compute), progress, factor=1.0)
    try:
        defaults, ours = (work.times(each.engine, each, cases, FIRST_SECONDS / 4) for each in (tuning.UNTUNED, chosen))
    finally:
        work.close()
    median = statistics.median
    faster = (case.size for case in cases if median(ours[case.id].times) < median(defaults[case.id].times))
    return next(faster, cases[-1].size)


def describe(candidate: Candidate) -> str:
    given = candidate.settings
    words: list[str] = [given.engine]
    if given.engine == "horovod-mpi":
        words += [given.algorithm, f"eager {given.eager_bytes >> 10}K", f"links {given.links}"]
        words += [f"segment {given.segment_bytes >> 10}K"] if given.segment_bytes else []
        words += [f"sockets {given.socket_bytes >> 10}K"] if given.socket_bytes else []
    words += [f"cycle {given.cycle_ms:g} ms", f"fusion {given.fusion_mb:g} MB"]
    if candidate.problem:
        return f"{', '.join(words)}: failed: {candidate.problem}"
    if not candidate.steps:
        return f"{', '.join(words)}: not measured"
    low, high = candidate.interval
    return f"{', '.join(words)}: {1e3 * candidate.median:.0f} ms ({1e3 * low:.0f}-{1e3 * high:.0f})"


def setting_effects(measured: list[Candidate]) -> list[dict[str, Any]]:
    """Per setting, the best step time with each of its values, and the difference between these.

    The values of a setting are compared within one engine, since most settings affect only one engine.
    """
    rows: list[dict[str, Any]] = []
    engines = sorted({candidate.settings.engine for candidate in measured})
    for name, engine in [("engine", None), *product(Tuning.model_fields.keys() - {"engine"}, engines)]:
        best: dict[str, float] = {}
        for candidate in measured:
            if candidate.steps and engine in (None, candidate.settings.engine):
                value = str(getattr(candidate.settings, name))
                best[value] = min(best.get(value, float("inf")), candidate.median)
        if len(best) > 1:
            label = f"{name} with {engine}" if engine else name
            matters = max(best.values()) / min(best.values()) - 1
            rows.append({"setting": label, "best_ms": {k: 1e3 * v for k, v in best.items()}, "matters": matters})
    return sorted(rows, key=lambda row: -row["matters"])


def write(path: Path, fabric: str, settings: Tuning) -> None:
    """Replace the file atomically: an interruption leaves the current settings."""
    content = files.mapping(path) if path.exists() else {"tuning": {}}
    content["tuning"][fabric] = settings.model_dump()
    new = path.with_suffix(".new")
    head = "# Written by `make tune`. Remove a fabric to return to its default settings.\n"
    new.write_text(head + yaml.safe_dump(content))
    new.replace(path)


class Steps:
    """Measures training steps as a sweep does, with given settings."""

    def __init__(self, contract: Contract, plan: Plan, progress: Progress) -> None:
        self.plan, self.work = plan, Communication(contract, plan.fabrics[0], plan.nodes[0], progress)
        self.group = next(unfold.points(plan, contract))
        self.shaped = contract.fabrics[contract.active_fabric].shaped

    def __call__(self, settings: Tuning, seconds: float, engine: str = "") -> list[float]:
        plan = self.plan.model_copy(update={"seconds": seconds})
        group = replace(self.group, engine=engine or settings.engine)
        scaling = spec.Scaling(self.work.scale if spec.emulated(plan) else 1.0)
        launches = [spec.launch_spec(plan, group, self.shaped, scaling, check=False)]
        gradients = spec.gradients(plan, plan.models)
        launch = self.work.launch(group.engine, settings, Spec(launches, gradients), "trials")
        for event in self.work.events(launch, START_LIMIT + 6 * seconds):
            if isinstance(event, TrialDone):
                return record.slowest(event.ranks, record.total)
        raise InfraError("the worker ended without a result")


def run(args: argparse.Namespace) -> int:
    state = State.existing(args.env)
    with state.locked():
        return tune(args, state, read_output(state))


def tune(args: argparse.Namespace, state: State, contract: Contract) -> int:
    fabric = args.fabric or contract.active_fabric
    if fabric not in contract.fabrics:
        raise UserError(f"--fabric {fabric}: unknown; choose one of {', '.join(contract.fabrics)}")
    count = len(contract.compute)
    if count < 2:
        raise UserError("tune: needs at least 2 nodes; run `make scale NODES=4`")
    plan = Plan(nodes=[count], batches=[args.batch], fabrics=[fabric], models=[args.model], device=args.device)
    check.check(plan, contract, count)
    before = tuning.choose(tuning.load(args.env), fabric, contract.fabrics[fabric], contract.provider)
    progress = Progress(args.env, stderr=args.json)

    def now(text: str) -> None:
        progress.now("tune", text)

    with progress.phase(f"tune {fabric}", quiet=True):
        with lock.measuring(contract.provider, progress.waiting):
            now(f"copying the worker to {count} nodes")
            deadline = time.monotonic() + 60 * args.minutes
            measure = Steps(contract, plan, progress)
            with closing(measure.work):
                result = search(
                    before, tuning.UNTUNED, measure, lambda: deadline - time.monotonic(), progress.line, now
                )
            now("comparing small messages with the defaults")
            below = small_below(contract, fabric, result.winner.settings, progress) if result.improved else 0
        if result.improved:
            progress.line(f"messages below {below >> 10} KB are faster with the defaults of Horovod and OpenMPI")
            write(tuning.file(args.env), fabric, result.winner.settings.model_copy(update={"small_below_bytes": below}))
            if fabric == contract.active_fabric:
                lifecycle.playbook(state, "site.yml", progress)
    report(args, fabric, result)
    return 0


def report(args: argparse.Namespace, fabric: str, result: Result) -> None:
    after = result.winner if result.improved else result.current
    rows = {"defaults": result.defaults, "before": result.current, "after": after}
    effects = setting_effects(result.candidates)
    if args.json:
        content = {
            **{"fabric": fabric, "kept": result.improved, "mattered": effects},
            **{name: {"settings": row.settings.model_dump(), "steps_s": row.steps} for name, row in rows.items()},
        }
        print(json.dumps(content, indent=1))
        return
    emulated = "EMULATED " if args.device.startswith("emulated:") else ""
    title = f"{emulated}step on {fabric}, {args.model}, batch {args.batch}"
    table = Table("", "step ms", "95%", "images/s against defaults", "settings", title=title, title_justify="left")
    for name, row in rows.items():
        low, high = row.interval
        gain = result.defaults.median / row.median
        words = describe(row).partition(": ")[0]
        table.add_row(name, f"{1e3 * row.median:.0f}", f"{1e3 * low:.0f}-{1e3 * high:.0f}", f"x{gain:.2f}", words)
    console.print(table)
    unchanged = "no candidate was significantly faster than the current settings; nothing changed"
    console.print(f"saved in {tuning.file(args.env)}" if result.improved else unchanged)
    for effect in effects if args.explain else []:
        values = ", ".join(f"{value}: {ms:.0f} ms" for value, ms in effect["best_ms"].items())
        console.print(f"{effect['setting']}: {effect['matters']:.0%} between best and worst value ({values})")
