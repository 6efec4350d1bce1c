"""Check a cluster in five minutes: GPUs, cards, NCCL, engines; one file says what differs from what we expect."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Any

from bench.comm.measure import Case, Communication
from bench.plan import check
from bench.plan.schema import Plan
from bench.results.trial import Trial
from bench.selfcheck import expectations, page
from bench.selfcheck.expectations import Finding
from bench.sweep import efa, evidence, executors, run_folder
from bench.sweep.command import provenance
from bench.sweep.progress import console
from bench.sweep.runner import Sweep
from cluster import device_check, tuning
from cluster.core import lock
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.terraform import read_output

# Of one trial: on GPUs the warm-up takes as long again.
SECONDS = 8.0
BATCH = 32
SMALLEST, LARGEST = 1 << 20, 64 << 20
# Without GPUs, ranks share cores and the fabric may be slow.
CPU_BYTES = 4 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", default="local", help="environment to check (default local)")
    parser.add_argument("--json", action="store_true", help="print findings and facts as JSON")


def run(args: argparse.Namespace) -> int:
    state = State.existing(args.env)
    contract = read_output(state)
    if contract.ssh is None:
        raise UserError(f"--env: {contract.provider} has jobs and no nodes to check; use make bench")
    with state.locked():
        return examine(args, state, contract)


def plan_for(contract: Contract) -> Plan:
    """One device, all devices of one node, and all nodes; on GPUs with both engines."""
    gpus, nodes = contract.gpus_per_node, len(contract.compute)
    per_node = sorted({1, gpus or 1})
    engines = ["horovod", "ddp"] if gpus else ["horovod"]
    device = "cuda" if gpus else "emulated:p100"
    return Plan.model_validate(
        {
            **{"title": "selfcheck", "nodes": sorted({1, nodes}), "gpus_per_node": per_node, "batches": [BATCH]},
            **{"fabrics": [contract.active_fabric], "engines": engines, "device": device, "seconds": SECONDS},
        }
    )


class Collector:
    """Findings and facts of all parts. A part that fails is a finding, and the next one starts."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.findings: list[Finding] = []
        self.facts: dict[str, Any] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        with self.progress.phase(name):
            try:
                yield
            except (InfraError, UserError) as error:
                self.findings.append(Finding(name, "to run", str(error), False))
            finally:
                # What a measurement of collectives did last.
                self.progress.now("cases", "")


def examine(args: argparse.Namespace, state: State, contract: Contract) -> int:
    cuda, plan = contract.gpus_per_node > 0, plan_for(contract)
    check.check(plan, contract, len(contract.compute))
    efa.require(contract, plan.fabrics, contract.compute, cuda)
    created = datetime.now(UTC)
    folder = run_folder.open_run(args.env, f"selfcheck-{created:%Y%m%d-%H%M%S}", plan)
    folder.prepare(plan.model_dump(), facts := provenance(args.env, contract))
    collect = Collector(Progress(args.env, stderr=args.json))
    collect.facts = {"env": args.env, "created": created.isoformat(timespec="seconds"), "provenance": facts}
    with lock.measuring(contract.provider, collect.progress.waiting):
        nodes(collect, args.env, contract, cuda)
    trials: list[Trial] = []
    with collect.part("training steps"):
        executor = executors.make(contract, args.env)
        Sweep(plan, folder, executor, tuning.load(args.env), evidence.read(state), check=True).run()
        trials = folder.trials()
    collect.findings += expectations.trials(trials, contract.nodes[contract.compute[0]].gpu_model)
    collect.facts["trials"] = [trial.model_dump(mode="json") for trial in trials]
    file = folder.folder / "selfcheck.md"
    file.write_text(page.markdown(collect.findings, collect.facts))
    differs = [one for one in collect.findings if one.ok is False]
    if args.json:
        print(json.dumps({"findings": [vars(one) for one in collect.findings], **collect.facts}, indent=1))
    else:
        for line in page.lines(differs):
            console.print(line)
        console.print(f"{page.summary(collect.findings)}; see {file}")
    return 1 if differs else 0


def nodes(collect: Collector, env: str, contract: Contract, cuda: bool) -> None:
    """Cards, GPUs and collectives."""
    work: Callable[[], Communication] = lambda: Communication(  # noqa: E731
        contract, contract.active_fabric, len(contract.compute), collect.progress, factor=1.0
    )
    with collect.part("cards and GPUs"), closing(work()) as communication:
        topology = communication.topology()
        collect.facts["topology"] = topology
        collect.findings += expectations.cards(contract, topology)
    with collect.part("a product on every device, and an all-reduce over all"):
        size = device_check.BYTES if cuda else CPU_BYTES
        done = device_check.measure(env, contract, cuda, size)
        checked = device_check.judge(done, contract)
        collect.facts["devices"] = checked.result()
        collect.findings += expectations.devices(checked, cuda)
    if not cuda or len(contract.compute) < 2:
        return
    with collect.part("collectives, and nccl-tests where it is installed"), closing(work()) as communication:
        settings = tuning.choose(
            tuning.load(env), contract.active_fabric, contract.fabrics[contract.active_fabric], contract.provider
        )
        cases = [Case("all_reduce", size) for size in (SMALLEST, LARGEST)]
        rows = communication.collectives("nccl", settings, cases, 2.0)
        rows += communication.nccl_tests(settings, ["all_reduce"], SMALLEST, LARGEST)
        collect.facts["collectives"] = rows
        collect.findings += expectations.beside_nccl_tests(rows)
