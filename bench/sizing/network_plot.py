"""Plot the buyer's table: throughput of each network, with its interval, per model and cluster size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from bench import charts
from bench.predict import assumptions
from bench.predict.inputs import Setup


def draw(rows: Sequence[Any], setups: Sequence[Setup], path: Path) -> None:
    """`rows` are those of bench.sizing.network, of these configurations."""
    setup, inside = setups[0], "; ".join(dict.fromkeys(assumptions.inside(one) for one in setups))
    data = [
        {
            "network": row.network if row.nics == 1 else f"{row.nics} x {row.network}",
            "cluster": f"{row.model}, {row.nodes} x {row.gpus_per_node} GPUs",
            "efficiency": row.efficiency,
            "low": row.efficiency * row.low / row.images_per_second,
            "high": min(1.0, row.efficiency * row.high / row.images_per_second),
            "limit": row.limit,
        }
        for row in rows
    ]
    order = list(dict.fromkeys(row["network"] for row in data))
    clusters = list(dict.fromkeys(row["cluster"] for row in data))
    chart = alt.Chart(alt.InlineData(values=data))
    x = alt.X("network:N", title=None, sort=order, axis=alt.Axis(labelAngle=-40))
    color = alt.Color("limit:N", title="Limit")
    y = alt.Y("efficiency:Q", title="Scaling efficiency", scale=alt.Scale(domain=[0, 1]))
    layers = alt.layer(
        chart.mark_bar().encode(x=x, y=y, color=color),
        chart.mark_rule(strokeWidth=2, color=charts.GREY).encode(x=x, y=alt.Y("low:Q"), y2="high:Q"),
    ).properties(width=240, height=160)
    gpu = " ".join(filter(None, (setup.gpu or "measured GPU", setup.precision)))
    title = alt.TitleParams(
        f"Networks for {gpu}, batch {setup.batch} per GPU",
        subtitle=[f"Predicted; {inside}.", "Line: 80% interval. Colour: what limits it."],
        anchor="start",
    )
    facet = alt.Facet("cluster:N", title=None, sort=clusters)
    charts.write(layers.facet(facet=facet, columns=3, title=title), path)
