"""Several runs side by side: the same training in different environments, over GPUs in all, batch by batch.

A curve is one run on one fabric, so curves never mix kinds of devices; emulated ones say so in their name.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import altair as alt

from bench import words
from bench.charts import colour_scale, style
from bench.report.page import asset, environment
from bench.report.plots import HEADER, count_axis
from bench.results import dimensions
from bench.results.dimensions import MODEL_NAMES
from bench.results.points import MergedPoint
from bench.results.runs import Run
from cluster.core.errors import UserError

HEAD = "Side by side: images/s, and in brackets the efficiency relative to one GPU"


@dataclass(frozen=True)
class Cell:
    curve: str
    model: str
    batch: int
    gpus: int
    images_s: float
    low: float
    high: float
    efficiency: float | None


def curve_name(run: Run, point: MergedPoint, varying: list[str]) -> str:
    env = str(run.provenance.get("env") or "")
    name = f"{env}/{run.name}" if env and env != run.name else run.name
    parts = [name, point.fabric_label]
    if varying:
        parts.append(dimensions.label(point.conditions, varying))
    if point.family.kind != "cuda":
        parts.append(f"{point.family.kind} {point.family.device_name}" if point.family.kind == "emulated" else "CPU")
    if run.provenance.get("constructed"):
        parts.append("(constructed example)")
    return " ".join(parts)


def cells(runs: list[Run]) -> list[Cell]:
    found: list[Cell] = []
    for run in runs:
        points = run.table().points
        # The others are a plot of their own (model, batch), its axis (nodes), or in the name anyway.
        shown = ("model", "batch", "nodes", "repeat", "fabric", "rate", "device")
        varying = dimensions.varying((point.conditions for point in points), without=shown)
        single: dict[tuple[str, str, int], float] = {}
        named = [(curve_name(run, point, varying), point) for point in points]
        for curve, point in named:
            if point.gpus == 1:
                single[(curve, point.family.model, point.batch)] = point.ips.median
        for curve, point in named:
            # One GPU needs no network, so the one-GPU point of any fabric serves.
            key = (curve, point.family.model, point.batch)
            base = single.get(key) or next((rate for other, rate in single.items() if other[1:] == key[1:]), None)
            share = point.ips.median / (point.gpus * base) if base else None
            ips = point.ips
            found.append(Cell(curve, point.family.model, point.batch, point.gpus, ips.median, ips.low, ips.high, share))
    if not found:
        raise UserError("RUN: none of these runs has a measured point; give runs with results")
    names = [(cell.curve, cell.model, cell.batch, cell.gpus) for cell in found]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"RUN: {name[0]} has two values for {name[3]} GPUs, batch {name[2]}; name each run once")
    return found


def charts(found: list[Cell], model: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        asdict(cell) | {"environment": cell.curve, "batch": f"batch {cell.batch}"}
        for cell in found
        if cell.model == model
    ]
    curves = sorted({row["environment"] for row in rows})
    legend = alt.Legend(title=None, orient="bottom", columns=2, labelLimit=0)
    colour = alt.Color("environment:N", scale=colour_scale(curves), legend=legend)
    axis = count_axis({row["gpus"] for row in rows})
    x = alt.X("gpus:Q", title="GPUs", axis=axis, scale=alt.Scale(zero=False))
    batches = sorted({row["batch"] for row in rows}, key=lambda text: int(text.split()[1]))
    facet = alt.Facet("batch:N", title=None, sort=batches, header=HEADER)
    out = {}
    axes = {
        "throughput": ("images_s", "images/s", alt.Scale(zero=True), "~s"),
        "efficiency": ("efficiency", "efficiency relative to one GPU", alt.Scale(domainMin=0), "%"),
    }
    for name, (field, title, scale, form) in axes.items():
        y = alt.Y(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(format=form))
        base = alt.Chart(alt.InlineData(values=rows)).encode(x=x, y=y, color=colour)
        lines = base.mark_line() + base.mark_point(filled=True, size=45)
        out[name] = lines.properties(width=280, height=230).facet(facet, columns=3)
    return out


def tables(found: list[Cell]) -> list[dict[str, Any]]:
    """One per model and batch."""
    groups: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in found:
        groups[(cell.model, cell.batch)].append(cell)
    out = []
    for (model, batch), members in sorted(groups.items()):
        curves = sorted({cell.curve for cell in members})
        known = {(cell.curve, cell.gpus): cell for cell in members}
        sizes = sorted({cell.gpus for cell in members})
        rows = [[str(gpus), *(written(known.get((curve, gpus))) for curve in curves)] for gpus in sizes]
        title = f"{MODEL_NAMES.get(model, model)}, batch {batch} per GPU"
        out.append({"title": title, "head": ["GPUs", *curves], "rows": rows})
    return out


def written(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    share = "" if cell.efficiency is None else f" ({words.percent(cell.efficiency)})"
    return f"{words.significant(cell.images_s)}{share}"


def markdown(found: list[Cell]) -> str:
    return environment().get_template("side_by_side.md.j2").render(head=HEAD, tables=tables(found))


def page(found: list[Cell]) -> str:
    """One page without scripts: the plots are drawn here."""
    import vl_convert

    figures = [
        {
            "title": f"{MODEL_NAMES.get(model, model)}: {name}",
            "svg": vl_convert.vegalite_to_svg(chart.to_dict(validate=False), config=style()),
        }
        for model in sorted({cell.model for cell in found})
        for name, chart in charts(found, model).items()
    ]
    template = environment().get_template("side_by_side.html.j2")
    return template.render(head=HEAD, css=asset("report.css"), figures=figures, tables=tables(found))
