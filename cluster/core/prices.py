"""What EC2 nodes have and cost: cluster/core/instances.yml, the one table that Terraform and `make cost` share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).parent / "instances.yml"
HOURS_PER_MONTH = 730
# Spot prices move by the minute; this share of the on-demand price is only to plan with.
SPOT_SHARE = 0.4


@dataclass(frozen=True)
class InstanceType:
    gpus: int
    gpu_model: str
    efa: int
    gbps: float
    scratch_gb: int
    interface: str
    usd_per_hour: float


@cache
def _table() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(TABLE.read_text())
    return content


@cache
def types() -> dict[str, InstanceType]:
    return {name: InstanceType(**values) for name, values in _table()["types"].items()}


def date() -> str:
    prices = _table()["prices"]
    return f"{prices['date']}, {prices['region']}"


def disk_per_hour(gigabytes: int) -> float:
    return float(_table()["prices"]["gp3_usd_per_gb_month"]) * gigabytes / HOURS_PER_MONTH


def address_per_hour() -> float:
    return float(_table()["prices"]["public_address_usd_per_hour"])
