"""Measure collectives, links between ring neighbours and topology on nodes of one fabric."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from bench.comm import nccl_tests
from bench.plan import scale_model
from bench.sweep import executors
from bench.sweep.launch import Launch
from bench.worker import protocol, step_statistics
from bench.worker.protocol import Allocation, CaseDone, CaseSpec, Event, Failed, LaunchSpec, Spec, Started, WarmUp
from cluster import tuning
from cluster.core import files, ssh, worker_files
from cluster.core.contract import Contract
from cluster.core.errors import InfraError
from cluster.core.process import Lines, die_with_parent
from cluster.core.progress import Progress
from cluster.tuning import Tuning

SIZE_FACTOR = 4
LINK_SECONDS = 2
START_LIMIT = 120
NCCL_TESTS_LIMIT = 600


@dataclass(frozen=True)
class Case:
    collective: str
    size: int  # bytes in the modelled cluster

    @property
    def id(self) -> str:
        return f"{self.collective}-{self.size}"

    def bus_factor(self, ranks: int) -> float:
        """Bus bandwidth over algorithm bandwidth, as in nccl-tests: bytes on the busiest link per byte of message."""
        if self.collective == "broadcast":
            return 1.0
        return (2 if self.collective == "all_reduce" else 1) * (ranks - 1) / ranks


def engine_name(engine: str) -> str:
    """nccl is Horovod started by MPI, with tensors on the GPUs."""
    return "horovod-mpi" if engine == "nccl" else engine


def sizes(smallest: int, largest: int) -> list[int]:
    values = []
    while smallest <= largest:
        values.append(smallest)
        smallest *= SIZE_FACTOR
    return values


class Link(TypedDict):
    """A link of the ring, as bench/worker/links.py prints it."""

    node: str
    to: str
    gbps: Annotated[float, Field(gt=0)]


class Card(TypedDict):
    interface: str
    mac: str | None
    mtu: int
    driver: str
    speed_mbit: int | None
    numa: int | None
    adapters: list[str]


class Gpu(TypedDict):
    bus: str
    name: str
    numa: int | None


class Topology(TypedDict):
    """A node, as bench/worker/topology.py prints it."""

    node: str
    cores: int
    numa_nodes: int
    card: Card
    gpus: list[Gpu]


@dataclass(frozen=True)
class Measured:
    """What a case was measured with."""

    engine: str
    settings: Tuning
    seconds: float


Known = dict[Measured, dict[str, CaseDone]]


class Communication:
    """Measures on some nodes of one fabric."""

    def __init__(
        self, contract: Contract, fabric: str, count: int, progress: Progress, factor: float | None = None
    ) -> None:
        """factor: the scale factor (default: from nodes and rate)."""
        self.contract, self.fabric, self.progress = contract, fabric, progress
        self.names = contract.compute[:count]
        self.rate = contract.fabrics[fabric].rate_gbps
        self.slots = min(contract.nodes[name].gpus for name in self.names)
        shaped = contract.fabrics[contract.active_fabric].shaped
        self.scale = (factor or scale_model.factor(count, self.rate)) if shaped else 1.0
        self.rate_mbit = self.rate * 1000 / self.scale if shaped else None
        self.executor = executors.on_nodes(contract)
        self.measured: Known = {}
        worker_files.install(contract, self.names)

    def events(self, launch: Launch, limit: float) -> list[Event]:
        return [event for line in self.output(launch, limit).splitlines() if (event := protocol.parse(line))]

    def output(self, launch: Launch, limit: float) -> str:
        """What a launch prints. Raises InfraError if it fails."""
        # The supervisor on the head ends the launch when its standard input closes, so keep it open.
        read_end, write_end = os.pipe()
        argv = self.executor.argv(launch)
        process = Popen(argv, stdin=read_end, stdout=PIPE, stderr=PIPE, text=True, preexec_fn=die_with_parent)
        os.close(read_end)
        where = f"{launch.engine} on {len(launch.hosts)} nodes"
        self.progress.now("launch", f"{where}: starting")
        out, err = Lines(process.stdout, partial(self.show, where)), Lines(process.stderr)
        self.deadline, self.limit = time.monotonic() + limit, limit
        try:
            # The queue of a scheduler moves the deadline.
            while process.poll() is None:
                if time.monotonic() > self.deadline:
                    raise InfraError(f"{where}: timeout after {limit:.0f} s")
                with suppress(TimeoutExpired):
                    process.wait(timeout=1)
        finally:
            os.close(write_end)
            try:
                process.wait(timeout=self.executor.grace)
            except TimeoutExpired:
                process.kill()
            self.progress.now("launch", "")
        text = out.text()
        reported = [event.error for line in text.splitlines() if isinstance(event := protocol.parse(line), Failed)]
        if process.returncode or reported:
            said = [line.strip() for line in err.text().splitlines() if line.strip() and protocol.MARK not in line]
            raise InfraError(f"{where} failed: {[*reported, *said[-1:], 'no output'][0][:300]}")
        return text

    def show(self, where: str, line: str) -> None:
        """Show the event of the worker that a line holds, if any."""
        match protocol.parse(line):
            case Allocation(job, state, reason):
                self.deadline = time.monotonic() + self.limit
                self.progress.now("launch", f"{where}: job {job} is {state} {reason}".rstrip())
            case Started(size):
                self.progress.now("launch", f"{where}: {size} processes started")
            case CaseDone(identifier):
                self.progress.now("launch", f"{where}: measured {identifier}")
            case WarmUp(identifier):
                self.progress.now("launch", f"{where}: warming up")
            case protocol.Progress(_, rate):
                self.progress.now("launch", f"{where}: {rate:.1f} images/s so far")

    def launch(self, engine: str, settings: Tuning, spec: Spec, program: str = "collectives") -> Launch:
        fabric = self.contract.fabrics[self.fabric]
        cuda = engine == "nccl"
        return Launch(
            run=f"{int(time.time() * 1000):x}",
            engine=engine_name(engine),
            hosts=tuple(self.names),
            slots=self.slots if cuda else 1,
            cuda=cuda,
            subnet=self.contract.subnet(self.fabric),
            interface=self.contract.interface(self.contract.head, self.fabric),
            transport=fabric.transport,
            spec=self.executor.install(self.names, spec),
            program=program,
            settings=settings,
            scale=self.scale,
        )

    def case_spec(self, engine: str, cases: list[CaseSpec]) -> Spec:
        return Spec([LaunchSpec(engine_name(engine), cases=cases, rate_mbit=self.rate_mbit, cuda=engine == "nccl")])

    def times(
        self, engine: str, settings: Tuning, cases: list[Case], seconds: float, known: Known | None = None
    ) -> dict[str, CaseDone]:
        """known: what need not be measured again, because `horovod` is one of the other engines; it grows."""
        by_launch: dict[Measured, list[CaseSpec]] = {}
        for case in cases:
            chosen = tuning.for_size(settings, case.size) if engine == "horovod" else settings
            key = Measured(chosen.engine if engine == "horovod" else engine, chosen, seconds)
            spec = CaseSpec(case.id, case.collective, self.count(engine, case), seconds)
            by_launch.setdefault(key, []).append(spec)
        found: dict[str, CaseDone] = {}
        for key, specs in by_launch.items():
            self.progress.now("cases", f"{engine}: {len(found)} of {len(cases)} cases measured")
            there: dict[str, CaseDone] = {} if known is None else known.setdefault(key, {})
            if pending := [spec for spec in specs if spec.id not in there]:
                limit = START_LIMIT + len(pending) * (10 * seconds + 30)
                launch = self.launch(key.engine, key.settings, self.case_spec(key.engine, pending))
                there |= {event.id: event for event in self.events(launch, limit) if isinstance(event, CaseDone)}
            found |= {spec.id: there[spec.id] for spec in specs if spec.id in there}
        return found

    def ranks(self, engine: str) -> int:
        return len(self.names) * (self.slots if engine == "nccl" else 1)

    def count(self, engine: str, case: Case) -> int:
        """Elements that are sent: the scaled size, rounded to a multiple of the ranks."""
        ranks = self.ranks(engine)
        return max(1, round(case.size / 4 / self.scale / ranks)) * ranks

    def bandwidth(self, engine: str, case: Case, seconds: float) -> float:
        """Bus bandwidth in Gbit/s of the modelled cluster."""
        return case.bus_factor(self.ranks(engine)) * self.count(engine, case) * 4 * self.scale * 8 / seconds / 1e9

    def collectives(self, engine: str, settings: Tuning, cases: list[Case], seconds: float) -> list[dict[str, Any]]:
        """One row per case, in the modelled cluster's units."""
        ranks = self.ranks(engine)
        measured = self.times(engine, settings, cases, seconds, self.measured)
        rows = []
        for case in cases:
            times = measured[case.id].times
            low, high = step_statistics.median_interval(times)
            median = statistics.median(times)
            bus = self.bandwidth(engine, case, median)
            rows.append(
                {
                    **{"collective": case.collective, "engine": engine, "nodes": len(self.names)},
                    **{"ranks": ranks, "fabric": self.fabric},
                    **{"size": case.size, "count": case.size // 4, "type": "float", "scale": self.scale},
                    **{"time_us": median * 1e6, "time_low_us": low * 1e6, "time_high_us": high * 1e6},
                    **{"algbw_gbps": bus / case.bus_factor(ranks), "busbw_gbps": bus},
                    **{"errors": measured[case.id].errors, "repetitions": len(times)},
                }
            )
        return rows

    def nccl_tests(
        self, settings: Tuning, collectives: Iterable[str], smallest: int, largest: int
    ) -> list[dict[str, Any]]:
        """Rows of nccl-tests, if every node has it. It cannot be scaled, so a shaped fabric has none."""
        if self.scale != 1 or not nccl_tests.installed(self.contract, self.names):
            return []
        found = []
        for name in collectives:
            self.progress.now("cases", f"nccl-tests: {name}")
            launch = self.launch("nccl", settings, Spec([]))
            words = nccl_tests.command(name, smallest, largest, SIZE_FACTOR)
            run = replace(launch, words=("python3", worker_files.folder(), "fabric", *words))
            given = {"collective": name, "engine": "nccl-tests", "nodes": len(self.names), "ranks": self.ranks("nccl")}
            output = self.output(run, NCCL_TESTS_LIMIT)
            found += [{**given, "fabric": self.fabric, "scale": 1.0, **row} for row in nccl_tests.rows(output)]
        return found

    def links(self) -> list[dict[str, Any]]:
        """iperf3 between ring neighbours at the same rate, in the modelled cluster's units."""
        # A launch without cases only sets the rate.
        self.progress.now("cases", "setting the rate of every node")
        self.events(self.launch("ddp", Tuning(), self.case_spec("ddp", [])), START_LIMIT)
        head = self.contract.head
        words = ["python3", worker_files.folder(), "links", str(LINK_SECONDS), *self.addresses()]
        argv = ssh.as_training_account(self.contract, head, words)
        self.progress.now("cases", f"iperf3 between {len(self.names)} neighbours, {LINK_SECONDS} s each")
        done = ssh.gather({head: argv}, timeout=START_LIMIT + 10 * len(self.names))[head]
        if done.returncode:
            raise InfraError(f"iperf3 between ring neighbours: {done.stderr.strip()[-300:]}")
        ring = files.answer(done.stdout, f"{head}: links", list[Link])
        if [row["node"] for row in ring] != self.names:
            raise InfraError(f"{head}: links: measured {len(ring)} links of {len(self.names)}; run `make doctor`")
        return [{**row, "gbps": row["gbps"] * self.scale} for row in ring]

    def addresses(self) -> list[str]:
        """NODE=ADDRESS on this fabric: a node's name stands for its address on the active one."""
        return [f"{name}={self.contract.nodes[name].fabric_addresses[self.fabric]}" for name in self.names]

    def topology(self) -> list[dict[str, Any]]:
        """The topology of every node, with its neighbour in the ring."""
        self.progress.now("cases", "reading the topology")
        words = ["python3", worker_files.folder(), "topology", self.contract.subnet(self.fabric)]
        argvs = {name: ssh.as_training_account(self.contract, name, words) for name in self.names}
        rows = []
        for (name, done), to in zip(ssh.gather(argvs).items(), [*self.names[1:], self.names[0]], strict=True):
            if done.returncode:
                raise InfraError(f"topology of {name}: {done.stderr.strip()[-300:]}")
            # A machine may call itself something else than cluster.yml does.
            rows.append({"to": to, **files.answer(done.stdout, f"topology of {name}", Topology), "node": name})
        return rows

    def close(self) -> None:
        self.executor.restore(self.names)
