"""What nodes have and cost: cluster/core/instances.yml (facts) and prices.yml (every price, with date and source)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cluster.core import files
from cluster.core.errors import UserError

INSTANCES = Path(__file__).parent / "instances.yml"
PRICES = Path(__file__).parent / "prices.yml"
HOURS_PER_MONTH = 730
# Spot prices change every minute. This share of the on-demand price is for planning only.
SPOT_SHARE = 0.4


@dataclass(frozen=True)
class InstanceType:
    gpus: int
    gpu_model: str
    efa: int
    gbps: float
    scratch_gb: int
    interface: str

    @property
    def card_gbps(self) -> float:
        """Of one network card."""
        return self.gbps / max(self.efa, 1)


@cache
def types() -> dict[str, InstanceType]:
    return {name: InstanceType(**facts) for name, facts in files.mapping(INSTANCES)["types"].items()}


@cache
def catalogue() -> dict[str, Any]:
    return files.mapping(PRICES)


def date() -> str:
    group = catalogue()["ec2_on_demand"]
    return f"{group['date']}, {group['region']}"


def instance_per_hour(name: str) -> float:
    known = catalogue()["ec2_on_demand"]["usd_per_hour"]
    if name not in known:
        raise UserError(f"{name}: no price in cluster/core/prices.yml; add one, or run `cluster prices --refresh`")
    return float(known[name])


def disk_per_hour(gigabytes: int) -> float:
    return float(catalogue()["ec2_extras"]["gp3_usd_per_gb_month"]) * gigabytes / HOURS_PER_MONTH


def address_per_hour() -> float:
    return float(catalogue()["ec2_extras"]["public_address_usd_per_hour"])


def gpu_per_hour(gpu: str) -> float:
    known = catalogue()["gpus"]["usd_per_hour"]
    if gpu not in known:
        raise UserError(f"--gpu-price: {gpu} has no price in cluster/core/prices.yml; give one")
    return float(known[gpu])


def node_per_hour() -> float:
    return float(catalogue()["nodes"]["usd_per_hour"])


def port_per_hour() -> dict[tuple[str, float], float]:
    """By transport and Gbit/s."""
    ports = catalogue()["nodes"]["port_usd_per_hour"]
    return {(via, float(rate)): float(price) for via, rates in ports.items() for rate, price in rates.items()}
