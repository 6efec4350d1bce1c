"""Plot predicted scaling: images/s by GPUs, one line per network, with the interval and the ideal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import altair as alt

from bench import charts
from bench.catalogue import interconnect
from bench.predict.inputs import Setup
from bench.predict.step import Prediction


def draw(rows: Sequence[tuple[str, Setup, Prediction]], path: Path) -> None:
    data = [
        {
            "network": label,
            "gpus": setup.gpus,
            "images_per_second": got.images_per_second,
            "low": got.low,
            "high": got.high,
            "ideal": setup.gpus * setup.single_images_per_second,
        }
        for label, setup, got in rows
    ]
    sizes = [setup.gpus for _, setup, _ in rows]
    spans_decades = max(sizes) > 32 * min(sizes)
    scale = alt.Scale(type="log" if spans_decades else "linear", zero=not spans_decades, nice=False)
    x = alt.X("gpus:Q", title="GPUs", scale=scale)
    color = alt.Color("network:N", title="Network", sort=None, legend=alt.Legend(symbolOpacity=1))
    chart = alt.Chart(alt.InlineData(values=data))
    axis = alt.Y("images_per_second:Q", title="Images per second", scale=scale)
    layers = alt.layer(
        chart.mark_line(strokeDash=[4, 4], color=charts.GREY).encode(x=x, y=alt.Y("ideal:Q", scale=scale)),
        chart.mark_area(opacity=0.2).encode(x=x, y=alt.Y("low:Q", scale=scale), y2="high:Q", color=color),
        chart.mark_line(point=True).encode(x=x, y=axis, color=color),
    )
    setup = rows[0][1]
    gpu = f"{setup.gpu or 'measured GPU'}, {setup.gpus_per_node} per node over {interconnect.NAMES[setup.intra]}"
    title = alt.TitleParams(
        f"Predicted scaling: {setup.model}, batch {setup.batch} per GPU",
        subtitle=[f"{gpu}; {setup.transport}, {setup.engine}", "Band: 80% interval. Dashed: ideal."],
        anchor="start",
    )
    charts.write(layers.properties(width=560, height=360, title=title), path)
