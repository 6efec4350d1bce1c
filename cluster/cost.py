"""`cluster cost`: the price of the nodes per hour, their cost so far, and the budget."""

from __future__ import annotations

import json
import time
from typing import Any

from cluster.core import config, files, prices
from cluster.core.config import Cluster
from cluster.core.state import State
from cluster.core.tables import columns
from cluster.providers import registry
from cluster.terraform import read_output


def hourly(instance_type: str, cluster: Cluster) -> float:
    """The price of one node: instance, disk and public address."""
    assert cluster.aws  # noqa: S101 (called only for clusters on AWS)
    instance = prices.instance_per_hour(instance_type) * (prices.SPOT_SHARE if cluster.aws.spot else 1)
    address = prices.address_per_hour() if cluster.aws.subnet_id is None else 0
    return instance + prices.disk_per_hour(cluster.aws.root_gb) + address


def bill(env: str) -> dict[str, Any]:
    """One row per node and their sum. Hours count from the start of each node; 0 if nothing is deployed."""
    cluster = config.load(env)
    if not cluster.aws:
        return {"provider": cluster.provider, "nodes": [], "usd_per_hour": 0.0, "usd_so_far": 0.0, "budget_usd": None}
    state = State(env)
    since: dict[str, int | None] = dict.fromkeys(["head", *(f"w{i}" for i in range(1, cluster.nodes))])
    if state.tfstate.exists():
        found = registry.provider(state, cluster).node_states(read_output(state))
        since = {name: info.since for name, info in found.items()}
    rows = []
    for name, started in since.items():
        kind = (cluster.aws.head_type if name == "head" else None) or cluster.aws.instance_type
        hours = max(time.time() - started, 0) / 3600 if started else 0.0
        price = hourly(kind, cluster)
        rows.append({"node": name, "type": kind, "usd_per_hour": price, "hours": hours, "usd": price * hours})
    return {
        "provider": cluster.provider,
        "prices": prices.date(),
        "spot": cluster.aws.spot,
        "deployed": state.tfstate.exists(),
        "nodes": rows,
        "usd_per_hour": sum(row["usd_per_hour"] for row in rows),
        "usd_so_far": sum(row["usd"] for row in rows),
        "budget_usd": cluster.aws.budget_usd,
        "expires": files.text(state.dir / "expires") if (state.dir / "expires").exists() else None,
    }


def run(env: str, as_json: bool) -> int:
    """Exit code 1 if the cost exceeds the budget."""
    result = bill(env)
    over = result["budget_usd"] is not None and result["usd_so_far"] > result["budget_usd"]
    if as_json:
        print(json.dumps({**result, "over_budget": over}, indent=1))
        return int(over)
    if result["budget_usd"] is None:
        print(f"ENV={env}: costs are known only for provider aws")
        return 0
    terms = f"spot, estimated at {prices.SPOT_SHARE:.0%} of on demand" if result["spot"] else "on demand"
    print(f"USD, {terms}, prices of {result['prices']}")
    cells = [
        (row["node"], row["type"], f"{row['usd_per_hour']:.3f}", f"{row['hours']:.1f}", f"{row['usd']:.2f}")
        for row in result["nodes"]
    ]
    print(columns(("node", "type", "per hour", "hours", "so far"), cells))
    hour, spent, budget = result["usd_per_hour"], result["usd_so_far"], result["budget_usd"]
    text = f"{hour:.2f} USD per hour, {hour * 24:.0f} per day; "
    if result["deployed"]:
        text += f"{spent:.2f} of {budget:g} so far for the current nodes; expires {result['expires']}"
    else:
        text += f"nothing is deployed; the budget of {budget:g} pays for {budget / hour:.0f} hours"
    print(text)
    if over:
        print(f"over budget; to stop the cost: make destroy ENV={env}")
    return int(over)
