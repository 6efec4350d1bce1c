"""The cheapest (per image) link rate, GPUs per node and batch that reach an efficiency."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.parse import TRANSPORTS, counts, numbers, share, transport
from bench.predict import assumptions, memory
from bench.predict.inputs import Setup
from bench.predict.step import Prediction, predict
from bench.sizing import components, costs
from bench.sizing.components import add_training_arguments
from bench.sizing.costs import Prices
from cluster.core.errors import UserError
from cluster.core.numbers import COUNT
from cluster.core.tables import columns

SHOWN = 5


@dataclass(frozen=True)
class Option:
    setup: Setup
    prediction: Prediction
    cost_per_hour: float

    @property
    def efficiency(self) -> float:
        return self.prediction.efficiency

    @property
    def efficiency_low(self) -> float:
        """The efficiency at the low end of the interval. It does not depend on the rate of one GPU."""
        got = predict(replace(self.setup, compute_doubt=0.0))
        return got.efficiency * got.low / got.images_per_second

    @property
    def cost_per_million_images(self) -> float:
        return self.cost_per_hour / (3600 * self.prediction.images_per_second) * 1e6


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target-efficiency", default="0.9", help="share of ideal scaling to reach (default 0.9)")
    parser.add_argument("--gpus", type=COUNT, default=64, help="total number of GPUs (default 64)")
    add_training_arguments(parser)
    parser.add_argument("--batch", default=None, help="batches per GPU to consider (default 32,64,128)")
    parser.add_argument("--gpus-per-node", default="1,2,4,8", help="values to consider (default 1,2,4,8)")
    parser.add_argument("--rate-gbps", help="link rates to consider (default: every rate with a price)")
    known = ", ".join(TRANSPORTS)
    parser.add_argument("--transport", help=f"transports to consider, a list of {known} (default: all with a price)")
    parser.add_argument("--sure", action="store_true", help="require the target at the low end of the 80%% interval")
    costs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    target = share(args.target_efficiency, "--target-efficiency")
    if args.gpus < 1:
        raise UserError(f"--gpus: {args.gpus} must be at least 1")
    if args.single_rate is not None and args.batch is None:
        raise UserError("--batch: give the batch that --single-rate was measured at")
    batches = counts(args.batch or "32,64,128", "--batch")
    if args.single_rate is not None and len(batches) > 1:
        raise UserError("--batch: --single-rate holds for one batch, give that one or a --gpu profile")
    known = costs.from_arguments(args)
    ports = _ports(args, known)
    found: list[Option] = []
    too_large: Setup | None = None
    for per_node in counts(args.gpus_per_node, "--gpus-per-node"):
        if args.gpus % per_node:
            continue
        for batch in batches:
            # One node needs no network, so one of them is enough.
            for via, rate in ports if args.gpus > per_node else [next(iter(ports))]:
                setup = components.any_size(args, batch, args.gpus, per_node, rate, via)
                if memory.fit(setup, "sgd").impossible:
                    too_large = setup
                    continue
                found.append(Option(setup, predict(setup), known.per_hour(setup)))
    if not found and too_large is not None:
        memory.check(too_large, "sgd")
    if not found:
        raise UserError(f"--gpus-per-node: none of {args.gpus_per_node} divides --gpus {args.gpus}")
    # Cheapest per image first.
    found.sort(key=lambda option: (option.cost_per_million_images, -option.prediction.images_per_second))
    enough = [option for option in found if (option.efficiency_low if args.sure else option.efficiency) >= target]
    # If nothing reaches the target, show what comes closest.
    shown = enough[:SHOWN] or sorted(found, key=lambda option: -option.efficiency)[:SHOWN]
    _print(args, target, known, ports, enough, shown)
    return 0 if enough else 1


def _ports(args: argparse.Namespace, every: Prices) -> dict[tuple[str, float], float]:
    known = every.ports
    wanted = [transport(word) for word in args.transport.split(",")] if args.transport else list(TRANSPORTS)
    priced = {via for via, _ in known}
    for via in wanted:
        if args.transport and via not in priced:
            raise UserError(f"--transport: {via} has no price, add --port-price {via}:GBPS=USD")
    found = {key: price for key, price in known.items() if key[0] in wanted}
    if args.rate_gbps:
        rates = numbers(args.rate_gbps, "--rate-gbps")
        for rate in rates:
            if rate not in {known_rate for _, known_rate in found}:
                raise UserError(f"--rate-gbps: {rate:g} has no price, add --port-price {wanted[0]}:{rate:g}=USD")
        found = {key: price for key, price in found.items() if key[1] in rates}
    return found


def _print(
    args: argparse.Namespace,
    target: float,
    known: Prices,
    ports: dict[tuple[str, float], float],
    enough: Sequence[Option],
    shown: Sequence[Option],
) -> None:
    if args.json:
        answer = {
            "target_efficiency": target,
            "reached": bool(enough),
            "prices": {
                "gpu_hour": known.gpu,
                "node_hour": known.node,
                "port_hour": {f"{via}:{rate:g}": price for (via, rate), price in ports.items()},
            },
            "best": _as_json(shown[0]),
            "options": [_as_json(option) for option in shown],
        }
        print(json.dumps(answer, indent=2))
        return
    listed = ", ".join(f"{via} {rate:g} Gbit/s {price:g}" for (via, rate), price in ports.items())
    print(f"USD per hour: GPU {known.gpu:g}, node {known.node:g}, port: {listed}")
    print("cost = GPUs x GPU + nodes x (node + port)")
    print(assumptions.text([option.setup for option in shown]))
    reached = f"{len(enough)} configurations reach {target:g}, cheapest per image first:"
    print(reached if enough else f"none reaches {target:g}; closest:", end="\n\n")
    head = (
        "Gbit/s",
        "transport",
        "GPUs/node",
        "nodes",
        "batch",
        "efficiency",
        "at least (80%)",
        "images/s",
        "USD/h",
        "USD/million",
    )
    cells = []
    for option in shown:
        setup, rate = option.setup, f"{option.prediction.images_per_second:.0f}"
        network = (f"{setup.rate_gbps:g}", setup.transport) if setup.nodes > 1 else ("-", "none")
        shares = f"{option.efficiency:.3f}", f"{option.efficiency_low:.3f}"
        sizes = setup.gpus_per_node, setup.nodes, setup.batch
        cells.append(
            (*network, *sizes, *shares, rate, f"{option.cost_per_hour:.2f}", f"{option.cost_per_million_images:.3f}")
        )
    print(columns(head, cells))


def _as_json(option: Option) -> dict[str, Any]:
    setup, got = option.setup, option.prediction
    return {
        "rate_gbps": setup.rate_gbps if setup.nodes > 1 else None,
        "transport": setup.transport if setup.nodes > 1 else None,
        **{name: getattr(setup, name) for name in ("gpus", "gpus_per_node", "nodes", "batch")},
        "efficiency": got.efficiency,
        "efficiency_low": option.efficiency_low,
        "images_per_second": got.images_per_second,
        "cost_per_hour": option.cost_per_hour,
        "cost_per_million_images": option.cost_per_million_images,
        "bottleneck": got.bottleneck,
        "interconnect": setup.intra,
    }
