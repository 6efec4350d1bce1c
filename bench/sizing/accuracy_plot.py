"""Plot hours to an accuracy against GPUs, with its two limits: perfect scaling, and the steps that no batch saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from bench import charts
from bench.predict.inputs import Setup
from bench.sizing import epochs
from bench.sizing.epochs import Workload


def draw(answers: Sequence[Any], setup: Setup, workload: Workload | None, path: Path) -> None:
    """`answers` are those of bench.sizing.accuracy, by GPUs."""
    known = [one for one in answers if one.hours is not None]
    first = known[0]
    data = [
        {
            "gpus": one.gpus,
            "hours": one.hours,
            "low": one.hours_low,
            "high": one.hours_high,
            # The network costs nothing: the same epochs at the rate of the GPUs alone.
            "alone": one.hours * one.images_per_second / (one.gpus * setup.single_images_per_second),
            # The batch costs nothing: the epochs of the smallest cluster.
            "steps": one.hours * first.epochs / one.epochs,
        }
        for one in known
    ]
    scale = alt.Scale(type="log", zero=False, nice=False)
    x = alt.X("gpus:Q", title="GPUs", scale=scale)

    def y(name: str) -> alt.Y:
        return alt.Y(f"{name}:Q", title="Hours", scale=scale)

    chart = alt.Chart(alt.InlineData(values=data))
    what = epochs.curve(workload) if workload else None
    noise = f", batch doubles the epochs at {what.noise_batch:,.0f}" if what else ""
    rate = f"{setup.rate_gbps:g} Gbit/s" if setup.rate_gbps else "unknown rate,"
    title = alt.TitleParams(
        f"Time to accuracy: {setup.model}, {setup.gpu or 'measured GPU'}, batch {setup.batch} per GPU",
        subtitle=[
            f"{setup.gpus_per_node} GPUs per node, {rate} {setup.transport}{noise}",
            "Band: 80% interval. Dashed: GPUs without a network. Dotted: without more epochs for a larger batch.",
        ],
        anchor="start",
    )
    layers = alt.layer(
        chart.mark_area(opacity=0.2, color=charts.PALETTE[1]).encode(x=x, y=y("low"), y2="high:Q"),
        chart.mark_line(strokeDash=[6, 4], color=charts.GREY).encode(x=x, y=y("alone")),
        chart.mark_line(strokeDash=[2, 3], color=charts.GREY).encode(x=x, y=y("steps")),
        chart.mark_line(point=True, color=charts.PALETTE[1]).encode(x=x, y=y("hours")),
    )
    charts.write(layers.properties(width=560, height=360, title=title), path)
