"""The buyer's table: what each network gives, costs and is limited by, and the price of a port that breaks even."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.parse import PLOT_FORMATS, counts, named_path, number, plot_path, transport
from bench.predict import assumptions, memory
from bench.predict.inputs import DEFAULTS, Setup
from bench.predict.step import Prediction, predict
from bench.sizing import components, costs, epochs
from bench.sizing.costs import Prices
from cluster.core import files
from cluster.core.errors import UserError
from cluster.core.numbers import COUNT
from cluster.core.tables import columns

INFINIBAND = {"ib-fdr": 56.0, "ib-edr": 100.0, "ib-hdr": 200.0, "ib-ndr": 400.0}
EXAMPLES = "10g,25g,25g-roce,100g,100g-roce,ib-hdr"
# Two networks in one cluster share its GPUs, hosts and frameworks: only what differs between them is in doubt.
SAME_HOSTS = replace(DEFAULTS, jitter_doubt=(0.0, 0.0), rest=0.0, host_doubt=0.0, intra_doubt=1.0, width=1.0)
# Less than this is no difference.
NOTICEABLE = 0.01


@dataclass(frozen=True)
class Network:
    name: str
    rate_gbps: float
    transport: str


@dataclass(frozen=True)
class Row:
    """One network in one cluster."""

    model: str
    nodes: int
    gpus_per_node: int
    network: str
    nics: int
    images_per_second: float
    low: float
    high: float
    efficiency: float
    limit: str
    cost_per_hour: float
    cost_per_million: float
    cost_per_run: float
    memory: str
    # Against the first network of the list: faster, slower, equal or cannot tell.
    against_first: str
    # USD per port and hour at which it costs as much per image as the first network.
    break_even_port: float | None
    # The networks whose interval overlaps this one's: more or less is not known.
    cannot_tell_from: tuple[str, ...] = ()


def parse_network(text: str) -> Network:
    name = text.strip().lower()
    if name in INFINIBAND:
        return Network(name, INFINIBAND[name], "verbs")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)g(-roce|-efa)?", name)
    if not found:
        raise UserError(f"--networks: {text!r} is not known; write 10g, 25g-roce, 100g-efa or {', '.join(INFINIBAND)}")
    via = {None: "tcp", "-roce": "verbs", "-efa": "efa"}[found[2]]
    return Network(name, number(found[1], "--networks"), via)


def configure(parser: argparse.ArgumentParser) -> None:
    components.add_training_arguments(parser)
    option = parser.add_argument
    option("--nodes", default="4", help="number of nodes, or a list (default 4)")
    option("--gpus-per-node", default="8", help="GPUs per node, or a list (default 8)")
    option("--networks", default=EXAMPLES, help=f"networks to compare (default {EXAMPLES})")
    option("--nics", default="1", help="ports per node, or a list (default 1)")
    option("--batch", type=COUNT, default=64, help="images or sequences per GPU and step (default 64)")
    option("--epochs", default="90", help="epochs of a training run (default 90)")
    option("--samples", default=str(epochs.IMAGENET), help=f"samples of an epoch (default ImageNet, {epochs.IMAGENET})")
    option("--optimizer", choices=tuple(memory.OPTIMIZERS), default="sgd", help="for the memory (default sgd)")
    costs.add_arguments(parser)
    text = "YAML file with gpu, node and ports (transport: {gbps: USD}), all per hour"
    option("--prices", type=named_path, metavar="FILE", help=text)
    option("--plot", type=plot_path, metavar="FILE", help=f"write images/s against networks; {PLOT_FORMATS}")


def run(args: argparse.Namespace) -> int:
    known = _prices(args)
    wanted = list(dict.fromkeys(parse_network(text) for text in args.networks.split(",")))
    samples = number(args.samples, "--samples") * number(args.epochs, "--epochs")
    names = list(dict.fromkeys(args.model.split(",")))
    rows: list[Row] = []
    setups: list[Setup] = []
    for model in names:
        asked = argparse.Namespace(**{**vars(args), "model": model})
        for nodes in counts(args.nodes, "--nodes"):
            for per_node in counts(args.gpus_per_node, "--gpus-per-node"):
                for nics in counts(args.nics, "--nics"):
                    same = [
                        components.setup(
                            asked, args.batch, nodes * per_node, per_node, one.rate_gbps, one.transport, nics
                        )
                        for one in wanted
                    ]
                    rows += compare(same, [one.name for one in wanted], known, samples, args.optimizer)
                    setups += same
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(_assumed(setups, known))
        print(_memory(rows, args.optimizer))
        print(_as_text(rows))
        print(f"cost = GPUs x GPU + nodes x (node + ports); a run is {samples:,.0f} samples")
        print("against, cannot tell: only the networks' own doubt counts; the GPUs and hosts are the same")
    if args.plot:
        from bench.sizing.network_plot import draw

        draw(rows, setups, args.plot)
    return 0


def compare(setups: Sequence[Setup], names: Sequence[str], known: Prices, samples: float, optimizer: str) -> list[Row]:
    """All networks of one cluster, each against the first."""
    found: list[Row] = []
    base = predict(setups[0])
    base_cost = known.per_hour(setups[0])
    for setup, name in zip(setups, names, strict=True):
        got = predict(setup)
        per_hour = known.per_hour(setup)
        per_sample = per_hour / got.images_per_second / 3600
        # The port that makes an image cost what it costs with the first network.
        even = base_cost / base.images_per_second * got.images_per_second
        ports = setup.nodes * setup.nics
        left = (even - setup.gpus * known.gpu - setup.nodes * known.node) / ports if setup.nodes > 1 else None
        row = Row(
            setup.model,
            setup.nodes,
            setup.gpus_per_node,
            name if setup.nodes > 1 else "none",
            setup.nics,
            got.images_per_second,
            got.low,
            got.high,
            got.efficiency,
            got.bottleneck,
            per_hour,
            1e6 * per_sample,
            samples * per_sample,
            memory.check(setup, optimizer).text,
            judge(setups[0], setup),
            left if setup is not setups[0] else None,
        )
        found.append(row)
        if setup.nodes == 1:
            # Without a network all are the same.
            return found
    alone = [predict(replace(setup, compute_doubt=0.0), SAME_HOSTS) for setup in setups]
    return [
        replace(row, cannot_tell_from=tuple(name for name, one in zip(names, alone, strict=True) if _overlap(got, one)))
        for row, got in zip(found, alone, strict=True)
    ]


def _overlap(ours: Prediction, theirs: Prediction) -> bool:
    if ours is theirs or (_narrow(ours) and _narrow(theirs)):
        return False
    return ours.low <= theirs.high and theirs.low <= ours.high


def judge(first: Setup, other: Setup) -> str:
    """Whether the other network is faster, where the doubts about both leave no overlap."""
    if first == other:
        return "-"
    ours, theirs = (predict(replace(setup, compute_doubt=0.0), SAME_HOSTS) for setup in (first, other))
    ratio = theirs.images_per_second / ours.images_per_second
    if abs(math.log(ratio)) < NOTICEABLE and _narrow(ours) and _narrow(theirs):
        return "equal"
    if theirs.low > ours.high:
        return "faster"
    return "slower" if theirs.high < ours.low else "cannot tell"


def _narrow(got: Prediction) -> bool:
    return math.log(got.high / got.low) < 2 * NOTICEABLE


def _prices(args: argparse.Namespace) -> Prices:
    known = costs.from_arguments(args)
    if args.prices is None:
        return known
    given = files.mapping(args.prices)
    unknown = set(given) - {"gpu", "node", "ports"}
    if unknown:
        raise UserError(f"--prices: {args.prices}: {sorted(unknown)[0]} is not known, use gpu, node and ports")
    ports, listed = dict(known.ports), given.get("ports") or {}
    if not isinstance(listed, dict):
        raise UserError(f"--prices: {args.prices}: ports must map transports to prices, such as {{tcp: {{25: 0.1}}}}")
    for via, rates in listed.items():
        if not isinstance(rates, dict):
            raise UserError(f"--prices: {args.prices}: ports.{via} must map Gbit/s to USD, such as {{25: 0.1}}")
        for rate, price in rates.items():
            ports[transport(str(via), "--prices"), number(str(rate), "--prices")] = number(str(price), "--prices")
    gpu = number(str(given["gpu"]), "--prices") if "gpu" in given else known.gpu
    node = number(str(given["node"]), "--prices") if "node" in given else known.node
    return Prices(gpu, node, ports)


def _assumed(setups: Sequence[Setup], known: Prices) -> str:
    via = ", ".join(dict.fromkeys(f"{one.rate_gbps:g} Gbit/s over {one.transport}" for one in setups))
    usd = f"USD per hour: GPU {known.gpu:g}, node {known.node:g}, ports as in `cluster prices`"
    return f"{assumptions.text(setups)}; {via}\n{usd}"


def _memory(rows: Sequence[Row], optimizer: str) -> str:
    needs = dict.fromkeys(f"{row.model} {row.memory}" for row in rows)
    return f"memory per GPU: {'; '.join(needs)} ({optimizer})"


def _as_text(rows: Sequence[Row]) -> str:
    head: tuple[str, ...] = (
        "model",
        "nodes",
        "GPUs/node",
        "network",
        "NICs",
        "samples/s",
        "80% interval",
        "efficiency",
        "limit",
    )
    head += ("USD/h", "USD/million", "USD/run", "against first", "cannot tell from", "break-even port")
    cells: list[Any] = []
    for row in rows:
        money = f"{row.cost_per_hour:.2f}", f"{row.cost_per_million:.3f}", f"{row.cost_per_run:,.0f}"
        even = "-" if row.break_even_port is None else f"{row.break_even_port:.2f}"
        rate = f"{row.images_per_second:.0f}", f"{row.low:.0f} to {row.high:.0f}", f"{row.efficiency:.3f}"
        where = row.model, row.nodes, row.gpus_per_node, row.network, row.nics
        cells.append((*where, *rate, row.limit, *money, row.against_first, " ".join(row.cannot_tell_from), even))
    return columns(head, cells)
