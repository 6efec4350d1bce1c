"""Fit a plan to a cluster: which plan it gets when none is named, and what `auto`, `active` and `all` mean on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.plan import schema
from bench.plan.schema import Plan
from bench.plan.unfold import one_job
from cluster.core import files
from cluster.core.contract import Contract

SCALE_MODEL = "emulated:p100"


def plan_name(cluster: Contract) -> str:
    """The shipped plan for a cluster: its provider's, the scale model's where that fits, otherwise `auto`."""
    if cluster.provider in schema.names():
        return cluster.provider
    quick = schema.load("quick")
    shaped = all(name in cluster.fabrics and cluster.fabrics[name].shaped for name in quick.fabrics)
    return "quick" if shaped and not cluster.gpus_per_node else "auto"


def load(text: str, cluster: Contract) -> Plan:
    """A plan by its name or path, with every field that depends on the cluster filled in."""
    path = schema.find(text)
    return files.validate(Plan, resolved(files.mapping(path), cluster), path.name, "plan")


def resolved(values: Mapping[str, Any], cluster: Contract) -> dict[str, Any]:
    gpus = cluster.gpus_per_node
    meanings: dict[str, dict[str, Any]] = {
        "device": {"auto": "cuda" if gpus else SCALE_MODEL},
        "gpus_per_node": {"auto": 1 if one_job(cluster) else gpus or 1},
        "nodes": {"auto": doubling(gpus if one_job(cluster) else len(cluster.compute))},
        "fabrics": {"active": [cluster.active_fabric], "all": list(cluster.fabrics)},
    }

    def meaning(name: str, value: Any) -> Any:
        return meanings.get(name, {}).get(value, value) if isinstance(value, str) else value

    return {name: meaning(name, value) for name, value in values.items()}


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and most itself."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*powers, max(most, 1)]
