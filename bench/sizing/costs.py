"""What a configuration costs per hour: one formula for every plan."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from bench.catalogue import gpu_rates
from bench.parse import number, transport
from bench.predict.inputs import Setup
from cluster.core import prices
from cluster.core.errors import UserError


@dataclass(frozen=True)
class Prices:
    """USD per hour of a GPU, of a node without GPUs, and of a port with its share of the switch."""

    gpu: float
    node: float
    ports: dict[tuple[str, float], float]

    def port(self, via: str, rate_gbps: float) -> float:
        """The listed price, or in proportion to the rate from the nearest one that is listed."""
        if (via, rate_gbps) in self.ports:
            return self.ports[via, rate_gbps]
        known = [rate for name, rate in self.ports if name == via]
        if not known:
            raise UserError(f"--port-price: no price for {via}; add --port-price {via}:{rate_gbps:g}=USD")
        nearest = min(known, key=lambda rate: abs(math.log(rate / rate_gbps)))
        return self.ports[via, nearest] * rate_gbps / nearest

    def per_hour(self, setup: Setup) -> float:
        """GPUs x GPU + nodes x (node + ports); a single node has no port."""
        port = 0.0
        if setup.nodes > 1 and setup.rate_gbps is not None:
            port = setup.nics * self.port(setup.transport, setup.rate_gbps)
        return setup.gpus * self.gpu + setup.nodes * (self.node + port)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--node-price", help="USD per node hour without GPUs (default: `cluster prices`)")
    parser.add_argument(
        "--port-price",
        action="append",
        default=[],
        metavar="TRANSPORT:GBPS=USD",
        help="price of a node's port per hour, such as tcp:25=0.1; can be repeated",
    )


def from_arguments(args: argparse.Namespace) -> Prices:
    # Without --gpu it is the price of a V100.
    gpu = prices.gpu_per_hour(gpu_rates.get(args.gpu or "v100").name) if args.gpu_price is None else None
    ports = prices.port_per_hour()
    for text in args.port_price:
        name, equals, price = text.partition("=")
        via, colon, rate = name.partition(":")
        if not equals or not colon:
            raise UserError(f"--port-price: {text!r} is not TRANSPORT:GBPS=USD, write for example tcp:25=0.1")
        ports[transport(via, "--port-price"), number(rate, "--port-price")] = number(price, "--port-price")
    node = number(args.node_price, "--node-price") if args.node_price else prices.node_per_hour()
    return Prices(number(args.gpu_price, "--gpu-price") if gpu is None else gpu, node, ports)
