"""One point as a row: what the page, the plots and the notebook show of it."""

from __future__ import annotations

from typing import Any

from bench import words
from bench.results.points import MergedPoint
from bench.results.trial import Breakdown, Interval

Row = dict[str, Any]


def short(value: float | None) -> float | None:
    """Five digits: more than any interval supports, and half the bytes on the page."""
    return None if value is None else float(f"{value:.5g}")


def row(point: MergedPoint, limit: str = "") -> Row:
    parts = point.breakdown
    return {
        "fabric": point.fabric_label,
        "rate": point.rate_gbps,
        "nodes": point.nodes,
        "gpus": point.gpus,
        "batch": point.batch,
        "group": point.group,
        "variant": point.family.variant,
        **interval(point.ips, "images_s", "images_low", "images_high"),
        "ideal": short(point.ideal),
        **interval(point.efficiency, "efficiency", "eff_low", "eff_high"),
        "eff_gpu": short(point.efficiency_gpu),
        **interval(point.step_ms, "step_ms", "step_low", "step_high"),
        **{name: short(getattr(parts, name)) if parts else None for name in Breakdown.model_fields},
        **interval(point.bus_gbps, "bus", "bus_low", "bus_high"),
        "link": short(point.link_gbps),
        "cpu": short(point.host_cpu),
        "scale": short(point.scale),
        # Only a failed check is a reason for doubt, not a check that was left out.
        "converged": point.converged is not False,
        "repeats": len(point.trials),
        "limit": limit,
        "stragglers": words.several(point.stragglers, 5) if point.stragglers else "",
        "id": point.trials[0].id,
    }


def interval(value: Interval | None, median: str, low: str, high: str) -> Row:
    found = (value.median, value.low, value.high) if value else (None, None, None)
    return dict(zip((median, low, high), map(short, found), strict=True))
