"""Time collectives on the cluster and compare them with the bandwidth of the link.

Sizes are those of the modelled cluster: on a shaped fabric, bytes and rate are both divided by the scale factor.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from bench.comm.measure import Case, Communication, sizes
from bench.plan import unfold
from bench.results import store
from bench.sweep import efa
from bench.sweep.progress import console
from cluster import tuning
from cluster.core import lock
from cluster.core.config import MAX_NODES
from cluster.core.contract import Contract
from cluster.core.errors import UserError, bounded
from cluster.core.numbers import SECONDS, Whole
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.terraform import read_output

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
# horovod: MPI or Gloo, from the fabric's tuning and the message size. nccl: Horovod started by MPI, tensors on GPUs.
ENGINES = ("horovod", "horovod-gloo", "horovod-mpi", "ddp", "nccl")
DEFAULT_ENGINES = ("horovod", "horovod-mpi", "ddp")
SMALLEST, LARGEST = 4 << 10, 512 << 20


def size(text: str) -> int:
    """4K, 64M or plain bytes."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper())
    try:
        value = int(text[:-1]) * factor if factor else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{bounded(text, 60)!r}: write a size such as 4K or 64M") from None
    # One element, and the largest message that is measured.
    if not 4 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{bounded(text, 60)}: write a size from 4 bytes to 512M")
    return value


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", default="local", help="environment to run on (default local)")
    parser.add_argument("--fabric", help="fabric of cluster.yml (default: the active one)")
    parser.add_argument("--nodes", type=Whole(2, MAX_NODES), help="number of nodes (default: all)")
    parser.add_argument("--collective", choices=COLLECTIVES, action="append", help="repeatable (default all_reduce)")
    text = f"repeatable (default: nccl on GPUs, else {', '.join(DEFAULT_ENGINES)})"
    parser.add_argument("--engine", choices=ENGINES, action="append", help=text)
    parser.add_argument("--from", dest="smallest", type=size, default=SMALLEST, help="smallest message (default 4K)")
    parser.add_argument("--to", dest="largest", type=size, default=64 << 20, help="largest (default 64M, maximum 512M)")
    text = "time limit per case, after at least five repetitions (default 2)"
    parser.add_argument("--seconds", type=SECONDS, default=2.0, help=text)
    parser.add_argument("--untuned", action="store_true", help="use the defaults of Horovod and OpenMPI")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    state = State.existing(args.env)
    with state.locked():
        return measure(args, read_output(state))


def measure(args: argparse.Namespace, contract: Contract) -> int:
    fabric = args.fabric or contract.active_fabric
    if fabric not in contract.fabrics:
        raise UserError(f"--fabric {fabric}: unknown; choose one of {', '.join(contract.fabrics)}")
    most = len(contract.compute)
    count = args.nodes or most
    if not 2 <= count <= most:
        raise UserError(f"--nodes {count}: use at least 2 nodes and at most the cluster's {most}")
    if args.smallest > args.largest:
        raise UserError("--from: larger than --to; exchange them")
    gpus = contract.gpus_per_node
    engines = list(dict.fromkeys(args.engine or (["nccl"] if gpus else DEFAULT_ENGINES)))
    if "nccl" in engines and not gpus:
        raise UserError("--engine nccl: the nodes have no GPUs; choose another engine")
    efa.require(contract, [fabric], contract.compute[:count], bool(gpus))
    names = dict.fromkeys(args.collective or ["all_reduce"])
    cases = [Case(name, n) for name in names for n in sizes(args.smallest, args.largest)]
    settings = tuning.UNTUNED if args.untuned else unfold.tuning_of(contract, fabric, tuning.load(args.env))
    progress = Progress(f"{args.env} {fabric}", stderr=args.json)
    with (
        progress.phase(f"comm: {len(cases)} cases with {', '.join(engines)} on {count} nodes"),
        lock.measuring(contract.provider, progress.waiting),
        closing(Communication(contract, fabric, count, progress)) as communication,
    ):
        topology = communication.topology()
        ring = communication.links()
        link_gbps = min(row["gbps"] for row in ring)
        measured = [row for name in engines for row in communication.collectives(name, settings, cases, args.seconds)]
        if "nccl" in engines:
            measured += communication.nccl_tests(settings, names, args.smallest, args.largest)
        rows = [{**row, "link_share": row["busbw_gbps"] / link_gbps} for row in measured]
    result = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "kind": "emulated" if communication.scale != 1 else "real",
        **{"env": args.env, "fabric": fabric, "rate_gbps": communication.rate, "scale": communication.scale},
        **{"settings": settings.model_dump(), "topology": topology, "ring": ring, "rows": rows},
    }
    path = store.RESULTS / args.env / "comm" / f"{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
        console.print(f"saved in {path}")
    return 1 if any(row["errors"] for row in rows) else 0


def or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def interval(row: dict[str, Any]) -> str:
    return "-" if row["time_low_us"] is None else f"{row['time_low_us']:.0f}-{row['time_high_us']:.0f}"


def numa_warnings(topology: list[dict[str, Any]]) -> list[str]:
    """One line per GPU that is on another NUMA node than the network card."""
    return [
        f"{node['node']}: GPU {gpu['bus']} is on NUMA node {gpu['numa']}, network card {node['card']['interface']} on "
        f"NUMA node {node['card']['numa']}: use a card on the GPU's NUMA node, or bind the process to the card's"
        for node in topology
        for gpu in node["gpus"]
        if None not in (gpu["numa"], node["card"]["numa"]) and gpu["numa"] != node["card"]["numa"]
    ]


def show(result: dict[str, Any]) -> None:
    link_gbps = min(row["gbps"] for row in result["ring"])
    links = ("node", "to", "Gbit/s", "of rate", "card", "card NUMA", "cores", "NUMA nodes", "GPUs (NUMA)")
    table = Table(*links, title="links of the ring (iperf3) and topology (hwloc)", title_justify="left")
    for row, node in zip(result["ring"], result["topology"], strict=True):
        card = node["card"]
        gpus = ", ".join(f"{gpu['name']} ({or_dash(gpu['numa'])})" for gpu in node["gpus"])
        table.add_row(
            *(row["node"], row["to"], f"{row['gbps']:.3f}", f"{row['gbps'] / result['rate_gbps']:.0%}"),
            *(f"{card['interface']} {card['driver']}", or_dash(card["numa"]), str(node["cores"])),
            *(str(node["numa_nodes"]), gpus or "-"),
        )
    console.print(table)
    for line in numa_warnings(result["topology"]):
        console.print(line)
    emulated = f"EMULATED, bytes and rate / {result['scale']:g}: " if result["kind"] == "emulated" else ""
    where = f"{result['fabric']}, {result['rows'][0]['nodes']} nodes"
    table = Table(title=f"{emulated}{where}, shares of {link_gbps:.3f} Gbit/s", title_justify="left")
    columns = ("collective", "engine", "size", "count", "type", "time us", "95%", "algbw", "busbw", "of link", "errors")
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for row in result["rows"]:
        table.add_row(
            *(row["collective"], row["engine"], str(row["size"]), str(row["count"]), row["type"]),
            *(f"{row['time_us']:.0f}", interval(row)),
            *(f"{row['algbw_gbps']:.3f}", f"{row['busbw_gbps']:.3f}"),
            *(f"{row['link_share']:.1%}", str(row["errors"])),
        )
    console.print(table)
