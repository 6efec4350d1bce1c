"""Measure what faults cost an elastic run: seconds to the next step, steps lost, images per second."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.elastic import report, trace
from bench.elastic.faults import FAULTS, Fault, Target, kill_rank, resume_node, start_node
from bench.elastic.live import Live, place_of_rank
from bench.elastic.report import Checked, Measured
from bench.results import store
from bench.run import command as run_command
from bench.run import nodes, request
from bench.sweep.progress import console
from cluster import lifecycle
from cluster.core import lock
from cluster.core.contract import Contract
from cluster.core.errors import UserError
from cluster.core.numbers import Whole
from cluster.core.paths import ROOT
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers.local import machine
from cluster.providers.local.provider import podman_settings
from cluster.terraform import read_output

# For a recovery. On a busy machine a rank alone takes half a minute to start.
SECONDS = 300.0
SCRIPT = "imagenet_elastic.py"
FOREVER = 1_000_000


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", default="local", help="environment to run on (default local)")
    parser.add_argument("--times", type=Whole(1, 100), default=5, metavar="N", help="rounds of all faults (default 5)")
    text = "repeatable (default: all; those of a whole node need provider local)"
    parser.add_argument("--fault", choices=list(FAULTS), action="append", help=text)
    text = "add to an earlier measurement in results/<env>/elastic what it lacks; latest: the last one"
    parser.add_argument("--resume", metavar="NAME", help=text)


def run(args: argparse.Namespace) -> int:
    state = State.existing(args.env)
    with state.locked():
        if not state.tfstate.exists():
            chosen(args.fault, state.cluster().planned())
            console.print("nothing is deployed; deploying first")
            lifecycle.deploy(args.env, None, False)
        contract = read_output(state)
        faults = chosen(args.fault, contract)
        folder = results(args.env, args.resume)
        progress = Progress(args.env)
        with (
            progress.phase(f"elastic: {len(faults)} faults, {args.times} times"),
            lock.measuring(contract.provider, progress.waiting),
        ):
            Measurement(args.env, state, contract, progress).run(folder, faults, args.times)
    console.print((folder / report.TABLE).read_text(), markup=False)
    console.print(f"saved in {folder}", markup=False)
    return 1 if any(one.problems for one in report.read(folder, report.CHECKS, Checked)) else 0


def chosen(names: list[str] | None, contract: Contract) -> list[Fault]:
    if len(contract.compute) < 3:
        raise UserError(f"elastic: needs at least 3 nodes, the cluster has {len(contract.compute)}; run `make scale`")
    faults = [FAULTS[name] for name in names or FAULTS]
    if contract.provider == "local":
        return faults
    if wrong := next((fault.name for fault in faults if names and fault.local), None):
        raise UserError(f"--fault '{wrong}': needs local nodes; on {contract.provider} choose 'rank killed'")
    return [fault for fault in faults if not fault.local]


def results(env: str, resume: str | None) -> Path:
    """The folder of a new measurement, or of an earlier one that it completes."""
    place = store.RESULTS / env / "elastic"
    if not resume:
        return place / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    known = sorted(path.parent.name for path in place.glob(f"*/{report.RECORDS}"))
    if not known or resume not in (*known, "latest"):
        raise UserError(f"--resume {resume}: no such measurement; known: {', '.join(known[-3:]) or 'none'}")
    return place / (known[-1] if resume == "latest" else resume)


@dataclass
class Measurement:
    env: str
    state: State
    contract: Contract
    progress: Progress

    @property
    def size(self) -> int:
        """Processes while no node is lost."""
        return len(self.contract.compute) * max(self.contract.gpus_per_node, 1)

    def run(self, folder: Path, faults: list[Fault], times: int) -> None:
        """One run of the example; the faults, one after the other, each when all nodes have trained for a while."""
        measured = report.read(folder, report.RECORDS, Measured)
        before = max((one.recovery.nodes_before for one in measured), default=self.size)
        if before != self.size:
            text = f"measured with {before} processes, the cluster has {self.size}; leave --resume out for a new folder"
            raise UserError(f"--resume {folder.name}: {text}")
        done = {(one.fault, one.round) for one in measured}
        pending = [(n, fault) for n in range(1, times + 1) for fault in faults if (fault.name, n) not in done]
        if pending:
            live = self.start()
            try:
                for number, fault in pending:
                    self.progress.now("elastic", f"round {number} of {times}: {fault.name}")
                    for one in self.measure(live, fault, number):
                        measured.append(one)
                        report.append(folder, report.RECORDS, one)
                        self.progress.line(f"{one.fault}: next step after {one.recovery.seconds:.1f} s")
            finally:
                self.end(live)
            report.append(folder, report.CHECKS, self.check(live))
        report.write(folder, measured, self.contract)

    @property
    def batch(self) -> int:
        return 32 if self.contract.gpus_per_node else 8

    @property
    def micro_batches(self) -> int:
        return 12 * max(self.contract.gpus_per_node, 1)

    def check(self, live: Live) -> Checked:
        """What the example's training was, faults included."""
        rows = trace.until_cancelled(live.rows("+1"))
        images = {image for row in rows for image in row.images}
        steps_per_epoch = math.ceil(len(images) / (self.batch * self.micro_batches))
        return Checked(live.run, len(trace.kept(rows)), len(images), trace.problems(rows, images, steps_per_epoch))

    def start(self) -> Live:
        small = () if self.contract.gpus_per_node else ("--model", "small", "--pixels", "32", "--workers", "0")
        size = ("--batch", str(self.batch), "--micro-batches", str(self.micro_batches))
        words = ["python", SCRIPT, *small, *size, "--epochs", str(FOREVER), "--trace"]
        parser = argparse.ArgumentParser()
        run_command.configure(parser)
        options = [
            "--env",
            self.env,
            "--detach",
            "--min-nodes",
            "1",
            "--env",
            "OMP_NUM_THREADS=1",
            "--folder",
            str(ROOT / "examples"),
        ]
        args = parser.parse_args([*options, "--", *words])
        asked = request.make(args, self.contract, request.split_env(args.env)[1])
        run_command.carry_out(args, self.env, self.state, self.contract, asked)
        return Live(self.contract, asked.id)

    def end(self, live: Live) -> None:
        """End the run, and repair the nodes that are stopped or paused."""
        if self.contract.provider == "local":
            for node in self.contract.compute:
                target = Target(self.contract, live.run, node)
                repair = {"paused": resume_node, "exited": start_node}.get(state_of(target))
                if repair:
                    repair(target)
        nodes.stop(self.contract, self.contract.compute, live.run)
        self.state.unmark_run()

    def measure(self, live: Live, fault: Fault, number: int) -> list[Measured]:
        rows = live.wait_for_size(self.size, SECONDS)
        head = self.contract.head
        if fault.rank0 and place_of_rank(rows, 0) == head:
            at = live.now()
            kill_rank(Target(self.contract, live.run, head))
            rows = live.wait_for_size(self.size, SECONDS, after=at)
        first = place_of_rank(rows, 0)
        workers = [node for node in self.contract.compute if node not in (head, first)]
        target = Target(self.contract, live.run, first if fault.rank0 else workers[number % len(workers)])
        found = [self.observe(live, fault.name, number, target, fault.inject)]
        if fault.repaired:
            found.append(self.observe(live, fault.repaired, number, target, fault.repair))
        return found

    def observe(self, live: Live, name: str, number: int, target: Target, act: Callable[[Target], None]) -> Measured:
        at = live.now()
        act(target)
        recovery = live.wait(name, lambda rows: trace.recovery(rows, at), SECONDS)
        return Measured(name, number, target.node, at, recovery, trace.series(live.rows(), at))


def state_of(target: Target) -> str:
    name = f"{target.contract.name}-{target.node}"
    with podman_settings() as settings:
        return machine.podman("inspect", "--format={{.State.Status}}", name, env=settings).strip()
