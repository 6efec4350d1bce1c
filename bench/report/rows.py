"""One point as a row: what the page, the plots and the notebook show of it."""

from __future__ import annotations

from typing import Any

from bench import words
from bench.results.points import MergedPoint

Row = dict[str, Any]

COLUMNS = [
    "fabric",
    "rate",
    "nodes",
    "gpus",
    "batch",
    "group",
    "variant",
    "images_s",
    "images_low",
    "images_high",
    "ideal",
    "efficiency",
    "eff_low",
    "eff_high",
    "eff_gpu",
    "step_ms",
    "step_low",
    "step_high",
    "compute",
    "exposed_comm",
    "data_wait",
    "straggler_wait",
    "bus",
    "bus_low",
    "bus_high",
    "link",
    "cpu",
    "scale",
    "converged",
    "repeats",
    "limit",
    "stragglers",
    "id",
]


def short(value: float | None) -> float | None:
    """Five digits: more than any interval supports, and half the bytes on the page."""
    return None if value is None else float(f"{value:.5g}")


def row(point: MergedPoint, limit: str = "") -> Row:
    parts, efficiency, bus = point.breakdown, point.efficiency, point.bus_gbps
    return {
        "fabric": words.fabric(point),
        "rate": point.rate_gbps,
        "nodes": point.nodes,
        "gpus": point.gpus,
        "batch": point.batch,
        "group": point.group,
        "variant": point.family.variant,
        "images_s": short(point.ips.median),
        "images_low": short(point.ips.low),
        "images_high": short(point.ips.high),
        "ideal": short(point.ideal),
        "efficiency": short(efficiency.median) if efficiency else None,
        "eff_low": short(efficiency.low) if efficiency else None,
        "eff_high": short(efficiency.high) if efficiency else None,
        "eff_gpu": short(point.efficiency_gpu),
        "step_ms": short(point.step_ms.median),
        "step_low": short(point.step_ms.low),
        "step_high": short(point.step_ms.high),
        "compute": short(parts.compute) if parts else None,
        "exposed_comm": short(parts.exposed_comm) if parts else None,
        "data_wait": short(parts.data_wait) if parts else None,
        "straggler_wait": short(parts.straggler_wait) if parts else None,
        "bus": short(bus.median) if bus else None,
        "bus_low": short(bus.low) if bus else None,
        "bus_high": short(bus.high) if bus else None,
        "link": short(point.link_gbps),
        "cpu": short(point.host_cpu),
        "scale": short(point.scale),
        # Not checked counts as sound: only a failed check is a reason for doubt.
        "converged": point.converged is not False,
        "repeats": len(point.trials),
        "limit": limit,
        "stragglers": words.several(point.stragglers, 5) if point.stragglers else "",
        "id": point.trials[0].id,
    }
