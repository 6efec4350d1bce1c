"""Compare collectives with the bandwidth of the link, tuned and untuned, on local nodes: `make perf-comm`.

Run on an idle machine. Creates an environment of its own and removes it. Figures that are compared come from the same
nodes and the same minutes. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/e2e")]

from test_cluster import BIN, make_env  # noqa: E402

from bench.catalogue import models  # noqa: E402
from bench.comm.measure import Case, Communication  # noqa: E402
from bench.plan.schema import Plan  # noqa: E402
from bench.tune.command import Steps  # noqa: E402
from bench.worker import step_statistics  # noqa: E402
from cluster import tuning  # noqa: E402
from cluster.core import lock  # noqa: E402
from cluster.core.contract import Contract  # noqa: E402
from cluster.core.progress import Progress  # noqa: E402
from cluster.core.state import State  # noqa: E402
from cluster.terraform import read_output  # noqa: E402
from cluster.tuning import UNTUNED, Tuning  # noqa: E402

ENV = "perfcomm"
FABRICS = ("1g", "10g")
# Nodes -> goal for the tuned bus bandwidth, as a multiple of the defaults'.
NODES = {2: 1.15, 4: 1.6, 8: 1.9}
MIN_LINK_SHARE = 0.93
# The goal is this share of the link if the multiple above would exceed it.
MAX_LINK_SHARE = 0.95
STEP_GAIN, STEP_BEHIND = 1.3, 0.03
SMALL, SMALL_SLOWER = (4 << 10, 16 << 10, 64 << 10), 0.05
REPEATS, SMALL_REPEATS = 2, 6
SECONDS = 4.0
console = Console(highlight=False, soft_wrap=True)


@dataclass
class Goals:
    missed: list[str] = field(default_factory=list)

    def met(self, ok: bool, goal: str) -> str:
        if not ok:
            self.missed.append(goal)
        return "yes" if ok else "NO"


def median(values: list[float]) -> str:
    low, high = step_statistics.median_interval(values)
    return f"{statistics.median(values):.3f} ({low:.3f}-{high:.3f})"


def in_turn(variants: dict[str, Callable[[], list[float]]]) -> dict[str, list[float]]:
    """Measure the variants in turn, so that other load on the machine affects all of them."""
    values: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(REPEATS):
        for name, measure in variants.items():
            values[name] += measure()
    return values


def bandwidths(work: Communication, settings: Tuning, case: Case) -> list[float]:
    timed = work.times(settings.engine, settings, [case], SECONDS)[case.id]
    return [work.bandwidth(settings.engine, case, seconds) for seconds in timed.times]


def large(contract: Contract, goals: Goals) -> None:
    case = Case("all_reduce", models.get("resnet50").gradient_bytes)
    table = Table(title="EMULATED all-reduce of ResNet-50's gradients, bus bandwidth in Gbit/s", title_justify="left")
    for column in ("fabric", "nodes", "iperf3", "tuned", "share", "93%", "defaults", "ratio", "goal", "max", "met"):
        table.add_column(column)
    for fabric in FABRICS:
        chosen = tuning.choose({}, fabric, contract.fabrics[fabric], contract.provider)
        for nodes, multiple in NODES.items():
            work = Communication(contract, fabric, nodes, Progress())
            try:
                link = min(row["gbps"] for row in work.links())
                measured = in_turn(
                    {
                        "tuned": partial(bandwidths, work, chosen, case),
                        "defaults": partial(bandwidths, work, UNTUNED, case),
                    }
                )
            finally:
                work.close()
            tuned, defaults = (statistics.median(measured[name]) for name in ("tuned", "defaults"))
            near = goals.met(tuned >= MIN_LINK_SHARE * link, f"{fabric}, {nodes} nodes: {tuned / link:.1%} of the link")
            within = multiple * defaults <= MAX_LINK_SHARE * link
            gain = goals.met(
                tuned >= (multiple * defaults if within else MAX_LINK_SHARE * link),
                f"{fabric}, {nodes} nodes: {tuned / defaults:.2f} x the defaults",
            )
            goal = f"{multiple:g}" if within else f"{MAX_LINK_SHARE:.0%} of iperf3"
            table.add_row(
                *(fabric, str(nodes), f"{link:.3f}", median(measured["tuned"]), f"{tuned / link:.1%}", near),
                *(median(measured["defaults"]), f"{tuned / defaults:.2f}", goal, f"{link / defaults:.2f}", gain),
            )
            console.print(f"{fabric}, {nodes} nodes: {tuned / link:.1%} of the link, {tuned / defaults:.2f} x defaults")
    console.print(table)


def small(contract: Contract, goals: Goals) -> None:
    """All bytes at the real rate: latency does not shrink with the scale factor."""
    table = Table(title="small all-reduces on 4 nodes, not scaled, time in ms", title_justify="left")
    for column in ("fabric", "bytes", "tuned", "defaults", "tuned / defaults", "met"):
        table.add_column(column)
    for fabric in FABRICS:
        chosen = tuning.choose({}, fabric, contract.fabrics[fabric], contract.provider)
        work = Communication(contract, fabric, 4, Progress(), factor=1.0)
        cases = [Case("all_reduce", size) for size in SMALL]
        times: dict[str, dict[str, list[float]]] = {"tuned": {}, "defaults": {}}
        try:
            for _ in range(SMALL_REPEATS):
                for name, settings in (("tuned", chosen), ("defaults", UNTUNED)):
                    for case, timed in work.times("horovod", settings, cases, 0.5).items():
                        times[name].setdefault(case, []).extend(1e3 * seconds for seconds in timed.times)
        finally:
            work.close()
        for case in cases:
            tuned, defaults = (statistics.median(times[name][case.id]) for name in ("tuned", "defaults"))
            met = goals.met(
                tuned <= (1 + SMALL_SLOWER) * defaults, f"{fabric}, {case.size} bytes: {tuned / defaults:.2f} x as long"
            )
            row = (median(times["tuned"][case.id]), median(times["defaults"][case.id]), f"{tuned / defaults:.2f}", met)
            table.add_row(fabric, str(case.size), *row)
    console.print(table)


def step(contract: Contract, goals: Goals) -> None:
    plan = Plan(nodes=[4], batches=[64], fabrics=["1g"], models=["resnet50"], device="emulated:p100")
    chosen = tuning.choose({}, "1g", contract.fabrics["1g"], contract.provider)
    measure = Steps(contract, plan, Progress())
    variants = {
        "tuned": chosen,
        "defaults": UNTUNED,
        "horovod-mpi, tuned": chosen.model_copy(update={"engine": "horovod-mpi"}),
    }
    try:
        measured = in_turn(
            {name: partial(measure, settings, 3 * SECONDS) for name, settings in variants.items()}
            | {"ddp": partial(measure, chosen, 3 * SECONDS, engine="ddp")}
        )
    finally:
        measure.work.close()
    table = Table(title="EMULATED step, ResNet-50, P100, batch 64, 4 nodes, 1g", title_justify="left")
    for column in ("", "images/s", "against defaults"):
        table.add_column(column)
    rates = {name: [4 * 64 / seconds for seconds in steps] for name, steps in measured.items()}
    middle = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        table.add_row(name, median(values), f"{middle[name] / middle['defaults']:.2f}")
    console.print(table)
    goals.met(middle["tuned"] >= STEP_GAIN * middle["defaults"], "the tuned step is not 1.3 times the defaults'")
    best = max(middle.values())
    goals.met(middle["tuned"] >= (1 - STEP_BEHIND) * best, "another engine's step is more than 3% faster")


PARTS: dict[str, Callable[[Contract, Goals], Any]] = {"large": large, "small": small, "step": step}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    args = parser.parse_args()
    chosen = args.parts or list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"{unknown[0]}: unknown part; choose from {', '.join(PARTS)}")
    shutil.rmtree(ROOT / "inventories" / ENV, ignore_errors=True)
    make_env(ENV, 84, max(NODES))
    cluster = [BIN / "cluster", "--env", ENV]
    goals = Goals()
    try:
        subprocess.run([*cluster, "deploy"], check=True, stdout=subprocess.DEVNULL)
        contract = read_output(State(ENV))
        with lock.measuring("local"):
            for name in chosen:
                PARTS[name](contract, goals)
    finally:
        subprocess.run([*cluster, "destroy"], check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(ROOT / "inventories" / ENV, ignore_errors=True)
        shutil.rmtree(ROOT / "results" / ENV, ignore_errors=True)
    console.print("all goals are met" if not goals.missed else "missed: " + "; ".join(goals.missed), markup=False)
    return 1 if goals.missed else 0


if __name__ == "__main__":
    sys.exit(main())
