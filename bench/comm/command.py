"""Time collectives on the cluster, each as a share of what the wire gives.

Sizes are the modelled cluster's: on a shaped fabric both the bytes and the rate are divided by the same factor s.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from bench.plan import scale_model, unfold
from bench.results import store
from bench.sweep import launch, nodes
from bench.sweep.executors import Nodes
from bench.sweep.progress import console
from bench.worker import step_statistics as statistics
from cluster import tuning
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.process import die_with_parent
from cluster.core.state import State
from cluster.terraform import read_output
from cluster.tuning import Tuning

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
# horovod: by what the fabric is tuned to for a message's size. nccl: Horovod started by MPI, tensors on the GPUs.
ENGINES = ("horovod", "horovod-gloo", "horovod-mpi", "ddp", "nccl")
USUAL = ("horovod", "horovod-mpi", "ddp")
SMALLEST, LARGEST, STEP = 4 << 10, 512 << 20, 4
LINK_SECONDS = 2
START_LIMIT = 120


def size(text: str) -> int:
    """4K, 64M or plain bytes."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper())
    try:
        value = int(text[:-1]) * factor if factor else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write a size such as 4K or 64M") from None
    if value < 4:
        raise argparse.ArgumentTypeError(f"{text!r}: at least 4 bytes, one element")
    return value


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", default="local", help="environment to run on (default local)")
    parser.add_argument("--fabric", help="fabric of cluster.yml (default: the active one)")
    parser.add_argument("--nodes", type=int, help="number of nodes (default: all)")
    parser.add_argument(
        "--collective", choices=COLLECTIVES, action="append", help="default all_reduce; may be repeated"
    )
    parser.add_argument(
        "--engine", choices=ENGINES, action="append", help=f"default: nccl on GPUs, else {', '.join(USUAL)}"
    )
    parser.add_argument("--from", dest="smallest", type=size, default=SMALLEST, help="smallest message (default 4K)")
    parser.add_argument("--to", dest="largest", type=size, default=64 << 20, help="largest (default 64M, at most 512M)")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="time per case, at least five repetitions (default 2)"
    )
    parser.add_argument("--untuned", action="store_true", help="with Horovod's and OpenMPI's own defaults")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


@dataclass(frozen=True)
class Case:
    collective: str
    size: int  # bytes in the modelled cluster

    @property
    def id(self) -> str:
        return f"{self.collective}-{self.size}"

    def bus_factor(self, ranks: int) -> float:
        """nccl-tests' factor from algorithm to bus bandwidth: what the busiest link carries per byte of message."""
        if self.collective == "broadcast":
            return 1.0
        return (2 if self.collective == "all_reduce" else 1) * (ranks - 1) / ranks


def sizes(smallest: int, largest: int) -> list[int]:
    found = []
    while smallest <= largest:
        found.append(smallest)
        smallest *= STEP
    return found


class Communication:
    """Measures on some nodes of one fabric."""

    def __init__(self, contract: Contract, fabric: str, count: int, factor: float | None = None) -> None:
        """factor: s, where it is not to follow from nodes and rate."""
        self.contract, self.fabric = contract, fabric
        self.names = [name for name, _ in contract.ordered()][:count]
        self.rate = contract.fabrics[fabric].rate_gbps
        self.slots = min(contract.nodes[name].gpus for name in self.names)
        shaped = contract.fabrics[contract.active_fabric].shaped
        self.scale = (factor or scale_model.factor(count, self.rate)) if shaped else 1.0
        self.rate_mbit = self.rate * 1000 / self.scale if shaped else None
        self.executor = Nodes(contract)
        self.worker = self.executor.install(self.names)

    def lines(self, job: launch.Launch, limit: float) -> list[dict[str, Any]]:
        # The supervisor on the head ends everything when its standard input closes: it stays open until we are done.
        reading, writing = os.pipe()
        process = subprocess.Popen(
            self.executor.argv(job, self.worker),
            stdin=reading,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        os.close(reading)
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise InfraError(f"{job.engine} on {len(job.hosts)} nodes: no end within {limit:.0f} s") from None
        finally:
            os.close(writing)
            try:
                process.wait(timeout=self.executor.grace)
            except subprocess.TimeoutExpired:
                process.kill()
        found = [json.loads(line.partition("@bench ")[2]) for line in out.splitlines() if "@bench " in line]
        if process.returncode:
            words = [line.strip() for line in err.splitlines() if line.strip()] or ["it said nothing"]
            raise InfraError(f"{job.engine} on {len(job.hosts)} nodes failed: {words[-1][:300]}")
        return found

    def job(self, engine: str, settings: Tuning, spec: dict[str, Any]) -> launch.Launch:
        fabric = self.contract.fabrics[self.fabric]
        cuda = engine == "nccl"
        common = {"rate_mbit": self.rate_mbit, "burst_ms": None, "one_thread": True, "cuda": cuda}
        return launch.Launch(
            run=f"{int(time.time() * 1000):x}",
            engine="horovod-mpi" if cuda else engine,
            hosts=tuple(self.names),
            slots=self.slots if cuda else 1,
            cuda=cuda,
            subnet=fabric.subnet,
            interface=fabric.interface,
            worker=f"{self.worker}/comm.py",
            spec=base64.b64encode(json.dumps({**spec, **common}).encode()).decode(),
            settings=settings,
            scale=self.scale,
        )

    def times(self, engine: str, settings: Tuning, cases: list[Case], seconds: float) -> dict[str, dict[str, Any]]:
        """Per case: the time of every repetition, the elements sent, and how many came back wrong."""
        ranks = self.ranks(engine)
        wanted: dict[Tuning, list[dict[str, Any]]] = {}
        for case in cases:
            count = max(1, round(case.size / 4 / self.scale / ranks)) * ranks
            sent = {"id": case.id, "collective": case.collective, "count": count, "seconds": seconds}
            given = tuning.for_size(settings, case.size) if engine == "horovod" else settings
            wanted.setdefault(given, []).append(sent)
        found: dict[str, dict[str, Any]] = {}
        for given, part in wanted.items():
            limit = START_LIMIT + len(part) * (10 * seconds + 30)
            job = self.job(given.engine if engine == "horovod" else engine, given, {"cases": part})
            lines = {line["id"]: line for line in self.lines(job, limit) if "id" in line}
            found |= {sent["id"]: {**sent, **lines[sent["id"]]} for sent in part}
        return found

    def ranks(self, engine: str) -> int:
        return len(self.names) * (self.slots if engine == "nccl" else 1)

    def bandwidth(self, engine: str, case: Case, count: int, seconds: float) -> float:
        """Bus bandwidth in Gbit/s of the modelled cluster."""
        return case.bus_factor(self.ranks(engine)) * count * 4 * self.scale * 8 / seconds / 1e9

    def collectives(self, engine: str, settings: Tuning, cases: list[Case], seconds: float) -> list[dict[str, Any]]:
        """One row per case, in the modelled cluster's units."""
        ranks = self.ranks(engine)
        found = self.times(engine, settings, cases, seconds)
        rows = []
        for case in cases:
            times, count = found[case.id]["times"], found[case.id]["count"]
            low, high = statistics.median_interval(times)
            middle = statistics.median(times)
            bus = self.bandwidth(engine, case, count, middle)
            rows.append(
                {
                    **{
                        "collective": case.collective,
                        "engine": engine,
                        "nodes": len(self.names),
                        "ranks": ranks,
                        "fabric": self.fabric,
                    },
                    **{"size": case.size, "count": case.size // 4, "type": "float", "scale": self.scale},
                    **{"time_us": middle * 1e6, "time_low_us": low * 1e6, "time_high_us": high * 1e6},
                    **{"algbw_gbps": bus / case.bus_factor(ranks), "busbw_gbps": bus},
                    **{"errors": found[case.id]["errors"], "repetitions": len(times)},
                }
            )
        return rows

    def links(self) -> list[dict[str, Any]]:
        """iperf3 between ring neighbours at the same rate, in the modelled cluster's units."""
        # The worker of a launch sets the rate; one that does nothing else leaves it set.
        self.lines(self.job("ddp", Tuning(), {"cases": []}), START_LIMIT)
        words = ["python3", f"{self.worker}/links.py", str(LINK_SECONDS), *self.names]
        done = subprocess.run(
            nodes.as_training_account(self.contract, self.names[0], words),
            capture_output=True,
            text=True,
            timeout=START_LIMIT + 10 * len(self.names),
        )
        if done.returncode:
            raise InfraError(f"iperf3 between ring neighbours: {done.stderr.strip()[-300:]}")
        ring: list[dict[str, Any]] = json.loads(done.stdout.partition("@bench ")[2])["ring"]
        return [{**row, "gbps": row["gbps"] * self.scale} for row in ring]

    def topology(self) -> list[dict[str, Any]]:
        """Who sends to whom in the ring, and through what."""
        words = ["python3", f"{self.worker}/topology.py", self.contract.fabrics[self.fabric].interface]
        running = [
            subprocess.Popen(
                nodes.as_training_account(self.contract, name, words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name in self.names
        ]
        rows = []
        for name, to, process in zip(self.names, [*self.names[1:], self.names[0]], running, strict=True):
            out, err = process.communicate(timeout=START_LIMIT)
            if process.returncode:
                raise InfraError(f"topology of {name}: {err.strip()[-300:]}")
            rows.append({"to": to, **json.loads(out.partition("@bench ")[2])})
        return rows

    def close(self) -> None:
        self.executor.restore(self.names)


def run(args: argparse.Namespace) -> int:
    contract = read_output(State(args.env))
    fabric = args.fabric or contract.active_fabric
    if fabric not in contract.fabrics:
        raise UserError(f"--fabric {fabric}: unknown; choose one of {', '.join(contract.fabrics)}")
    count = args.nodes or len(contract.nodes)
    if not 2 <= count <= len(contract.nodes):
        raise UserError(f"--nodes {count}: a collective needs 2 or more of the cluster's {len(contract.nodes)} nodes")
    if not args.smallest <= args.largest <= LARGEST:
        raise UserError("--from and --to: the smallest must not exceed the largest, and that not 512M")
    gpus = min(node.gpus for node in contract.nodes.values())
    chosen = args.engine or (["nccl"] if gpus else USUAL)
    if "nccl" in chosen and not gpus:
        raise UserError("--engine nccl: the nodes have no GPUs; choose another engine")
    cases = [Case(name, n) for name in args.collective or ["all_reduce"] for n in sizes(args.smallest, args.largest)]
    settings = tuning.UNTUNED if args.untuned else unfold.tuning_of(contract, fabric, tuning.load(args.env))
    folder = store.RESULTS / args.env / "comm"
    work = Communication(contract, fabric, count)
    try:
        topology = work.topology()
        ring = work.links()
        wire = min(row["gbps"] for row in ring)
        rows = []
        for engine in chosen:
            for row in work.collectives(engine, settings, cases, args.seconds):
                rows.append({**row, "link_share": row["busbw_gbps"] / wire})
    finally:
        work.close()
    result = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "kind": "emulated" if work.scale != 1 else "real",
        **{"env": args.env, "fabric": fabric, "rate_gbps": work.rate, "scale": work.scale},
        **{"settings": settings.model_dump(), "topology": topology, "ring": ring, "rows": rows},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(result, indent=1))
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
        console.print(f"kept in {path}", markup=False)
    return 1 if any(row["errors"] for row in rows) else 0


def known(value: int | None) -> str:
    return "-" if value is None else str(value)


def far_apart(topology: list[dict[str, Any]]) -> list[str]:
    """GPUs that reach the card through another socket's memory."""
    return [
        f"{node['node']}: GPU {gpu['bus']} is on NUMA node {gpu['numa']}, its card {node['card']['interface']} on "
        f"{node['card']['numa']}: use a card beside the GPU, or bind the process to the card's node"
        for node in topology
        for gpu in node["gpus"]
        if None not in (gpu["numa"], node["card"]["numa"]) and gpu["numa"] != node["card"]["numa"]
    ]


def show(result: dict[str, Any]) -> None:
    wire = min(row["gbps"] for row in result["ring"])
    table = Table(title="the ring, by iperf3 and hwloc", title_justify="left")
    for column in ("node", "to", "Gbit/s", "of the rate", "card", "its NUMA", "cores", "NUMA nodes", "GPUs (NUMA)"):
        table.add_column(column)
    for row, node in zip(result["ring"], result["topology"], strict=True):
        card = node["card"]
        gpus = ", ".join(f"{gpu['name']} ({known(gpu['numa'])})" for gpu in node["gpus"])
        table.add_row(
            *(row["node"], row["to"], f"{row['gbps']:.3f}", f"{row['gbps'] / result['rate_gbps']:.0%}"),
            *(f"{card['interface']} {card['driver']}", known(card["numa"]), str(node["cores"])),
            *(str(node["numa_nodes"]), gpus or "-"),
        )
    console.print(table)
    for line in far_apart(result["topology"]):
        console.print(line, markup=False)
    emulated = f"EMULATED, bytes and rate / {result['scale']:g}: " if result["kind"] == "emulated" else ""
    count = result["rows"][0]["nodes"]
    table = Table(
        title=f"{emulated}{result['fabric']}, {count} nodes, shares of {wire:.3f} Gbit/s", title_justify="left"
    )
    columns = (
        "collective",
        "engine",
        "size",
        "count",
        "type",
        "time us",
        "95%",
        "algbw",
        "busbw",
        "of the wire",
        "errors",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for row in result["rows"]:
        table.add_row(
            *(row["collective"], row["engine"], str(row["size"]), str(row["count"]), row["type"]),
            f"{row['time_us']:.0f}",
            f"{row['time_low_us']:.0f}-{row['time_high_us']:.0f}",
            f"{row['algbw_gbps']:.3f}",
            f"{row['busbw_gbps']:.3f}",
            f"{row['link_share']:.1%}",
            str(row["errors"]),
        )
    console.print(table)
