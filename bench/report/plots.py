"""The plots of a report as Altair charts, for the page, PNG, SVG and the notebook."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import altair as alt

from bench.charts import GREY, PALETTE, caveat, colour_scale
from bench.report.rows import Row, row
from bench.results.points import Family, MergedPoint, Table

PARTS = {
    "compute": ("compute", "#5b9bd5"),
    "exposed_comm": ("exposed communication", "#e8743b"),
    "data_wait": ("data wait", "#b05cc6"),
    "straggler_wait": ("straggler wait", "#c9a227"),
}
TITLES = {
    "throughput": "Throughput",
    "efficiency": "Scaling efficiency: share of the ideal throughput",
    "split": "Where the time of a step goes",
    "bus": "All-reduce bus bandwidth",
    "variants": "Training methods compared",
}
# Grey lines by the field that they show. A title names those for which the rows have values.
LINES = {
    "throughput": {"ideal": "dashed: ideal"},
    "bus": {"rate": "dashed: link rate", "link": "dotted: link as measured"},
    "variants": {"ideal": "dashed: ideal"},
}
# With more, Vega chooses the ticks of the node axis: they are then whole numbers.
MOST_TICKS = 16
HEADER = alt.Header(labelFontSize=13, labelFontWeight="bold", labelPadding=4)


@dataclass(frozen=True)
class Look:
    """What a chart needs beside its rows."""

    fabrics: tuple[str, ...]
    variants: tuple[str, ...]
    subject: str
    caveat: str
    log_nodes: bool = False
    strong: bool = False
    # The node counts, and the lines that its rows have. report.js sets both for the rows that it shows.
    nodes: tuple[int, ...] = ()
    lines: frozenset[str] = frozenset()

    def title(self, name: str) -> alt.TitleParams:
        named = [text for field, text in LINES.get(name, {}).items() if field in self.lines]
        text = TITLES[name] + (f" ({', '.join(named)})" if named else "")
        lines = [line for line in (self.subject, self.caveat) if line]
        plain: dict[str, Any] = {} if self.caveat else {"subtitleColor": GREY}
        sizes: dict[str, Any] = {"fontSize": 16, "subtitleFontSize": 12, "subtitlePadding": 5, "offset": 14}
        return alt.TitleParams(text=text, subtitle=lines, anchor="start", **sizes, **plain)


@dataclass(frozen=True)
class Colour:
    field: str
    scale: alt.Scale
    legend: alt.Legend | None


def nodes_axis(look: Look) -> alt.X:
    kind: dict[str, Any] = {"type": "log", "base": 2} if look.log_nodes else {"zero": False}
    scale = alt.Scale(**kind, nice=False, padding=14)
    return alt.X("nodes:Q", title="nodes", scale=scale, axis=count_axis(look.nodes))


def count_axis(counts: Collection[int]) -> alt.Axis:
    """Ticks where points are: Vega would add 1.5 and print it as 2."""
    few = 0 < len(counts) <= MOST_TICKS
    ticks: dict[str, Any] = {"values": sorted(counts)} if few else {"tickMinStep": 1}
    return alt.Axis(format="d", grid=False, labelOverlap="greedy", **ticks)


def hover(*extra: alt.Tooltip) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("fabric:N", title="fabric"),
        alt.Tooltip("nodes:Q", title="nodes"),
        alt.Tooltip("gpus:Q", title="GPUs"),
        alt.Tooltip("batch:Q", title="batch per GPU"),
        *extra,
        alt.Tooltip("limit:N", title="limit"),
        alt.Tooltip("id:N", title="trial"),
    ]


def interval(median: str, low: str, high: str, title: str, form: str) -> list[alt.Tooltip]:
    named = ((median, title), (low, "95% from"), (high, "to"))
    return [alt.Tooltip(f"{field}:Q", title=text, format=form) for field, text in named]


def images_over_nodes(data: Any, look: Look, colour: Colour, tips: list[alt.Tooltip]) -> Any:
    axis = alt.Axis(format=",~f", tickCount=6)
    y = alt.Y("images_s:Q", title="images/s, all GPUs", scale=alt.Scale(zero=True), axis=axis)
    base = alt.Chart(data)
    grey: dict[str, Any] = {"strokeDash": [5, 4], "color": GREY, "strokeWidth": 1.5}
    ideal = base.mark_line(**grey).encode(x=nodes_axis(look), y=alt.Y("ideal:Q"), detail=f"{colour.field}:N")
    # A line through one point cannot be seen: a short one marks it. report.js leaves it out where it is not needed.
    single = base.mark_point(shape="stroke", size=3000, opacity=1, **grey).encode(x=nodes_axis(look), y="ideal:Q")
    lines = [ideal] if len(look.nodes) > 1 else [ideal, single.properties(name="single")]
    return alt.layer(*lines, *curve(base, look, y, ("images_s", "images_low", "images_high"), colour, tips))


def curve(
    base: alt.Chart, look: Look, y: alt.Y, fields: tuple[str, str, str], colour: Colour, tips: list[alt.Tooltip]
) -> list[Any]:
    """Line, interval and point; `fields` are the median and the ends of its interval."""
    x = nodes_axis(look)
    median, low, high = fields
    ink = alt.Color(f"{colour.field}:N", scale=colour.scale, legend=colour.legend)
    return [
        base.mark_line(strokeWidth=2).encode(x=x, y=y, color=ink),
        base.mark_rule(strokeWidth=2.5, opacity=0.55).encode(x=x, y=f"{low}:Q", y2=f"{high}:Q", color=ink),
        base.mark_point(size=44, strokeWidth=2, opacity=1).encode(
            x=x,
            y=y,
            color=ink,
            fill=alt.Fill(f"{colour.field}:N", scale=colour.scale, legend=colour.legend),
            fillOpacity=alt.condition("datum.converged", alt.value(1), alt.value(0)),
        ),
        # A larger invisible target, for touch screens.
        base.mark_point(size=420, opacity=0, filled=True).encode(x=x, y=f"{median}:Q", tooltip=tips),
    ]


def legend() -> alt.Legend:
    symbol: dict[str, Any] = {"symbolType": "stroke", "symbolStrokeWidth": 4, "symbolSize": 140, "symbolOpacity": 1}
    return alt.Legend(orient="top", title=None, labelLimit=300, **symbol)


def of_batch() -> alt.Facet:
    return alt.Facet("panel:N", title=None, sort=alt.EncodingSortField("group", op="min"), header=HEADER)


def of_fabric(look: Look) -> alt.Facet:
    return alt.Facet("fabric:N", title=None, sort=list(look.fabrics), header=HEADER)


def throughput(data: Any, look: Look) -> Any:
    colour = Colour("fabric", colour_scale(look.fabrics), legend())
    tips = hover(
        *interval("images_s", "images_low", "images_high", "images/s", ",.4~r"),
        alt.Tooltip("ideal:Q", title="ideal", format=",.4~r"),
        alt.Tooltip("efficiency:Q", title="efficiency", format=".1%"),
    )
    return facet(images_over_nodes(data, look, colour, tips), of_batch(), look, "throughput")


def efficiency(data: Any, look: Look) -> Any:
    colour = Colour("fabric", colour_scale(look.fabrics), legend())
    y = alt.Y(
        "efficiency:Q",
        title="scaling efficiency",
        scale=alt.Scale(domain=[0, 1.05], clamp=True),
        axis=alt.Axis(format="%", values=[0, 0.25, 0.5, 0.75, 1], labelOverlap=False),
    )
    tips = hover(
        *interval("efficiency", "eff_low", "eff_high", "efficiency", ".1%"),
        alt.Tooltip("eff_gpu:Q", title="against one GPU", format=".1%"),
        alt.Tooltip("images_s:Q", title="images/s", format=",.4~r"),
    )
    ideal = alt.Chart(data).mark_rule(strokeDash=[5, 4], color=GREY, strokeWidth=1.5).encode(y=alt.datum(1))
    layers = alt.layer(ideal, *curve(alt.Chart(data), look, y, ("efficiency", "eff_low", "eff_high"), colour, tips))
    return facet(layers, of_batch(), look, "efficiency")


def split(data: Any, look: Look) -> Any:
    names = list(PARTS)
    titles, colours = zip(*PARTS.values(), strict=True)
    labels = "{" + ", ".join(f"{name}: '{title}'" for name, (title, _) in PARTS.items()) + "}"
    legend = alt.Legend(orient="top", title=None, columns=2, labelLimit=300, symbolType="square")
    base = alt.Chart(data)
    x = alt.X("nodes:O", title="nodes", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    bars = (
        base.transform_fold([*names], as_=["part", "ms"])
        .transform_calculate(what=f"({labels})[datum.part]", order=f"indexof({names}, datum.part)")
        .mark_bar()
        .encode(
            x=x,
            y=alt.Y("ms:Q", title="ms per step", stack="zero"),
            color=alt.Color("what:N", scale=alt.Scale(domain=titles, range=colours), legend=legend),
            order=alt.Order("order:Q"),
            tooltip=hover(
                alt.Tooltip("what:N", title="part"),
                alt.Tooltip("ms:Q", title="ms", format=",.4~r"),
                *interval("step_ms", "step_low", "step_high", "step ms", ",.4~r"),
                alt.Tooltip("stragglers:N", title="slow nodes"),
            ),
        )
    )
    whisker = base.mark_rule(color=GREY, strokeWidth=2).encode(x=x, y=alt.Y("step_low:Q"), y2="step_high:Q")
    return facet(alt.layer(bars, whisker), of_fabric(look), look, "split")


def bus(data: Any, look: Look) -> Any:
    base = alt.Chart(data).transform_filter("datum.nodes > 1 && isValid(datum.bus)")
    colour = Colour("fabric", colour_scale(look.fabrics), None)
    y = alt.Y("bus:Q", title="Gbit/s", scale=alt.Scale(zero=True), axis=alt.Axis(format="~r"))
    tips = hover(
        *interval("bus", "bus_low", "bus_high", "bus bandwidth, Gbit/s", ".3~r"),
        alt.Tooltip("link:Q", title="link measured, Gbit/s", format=".3~r"),
        alt.Tooltip("rate:Q", title="link rate, Gbit/s", format=".3~r"),
    )
    # From edge to edge, because a line through one point cannot be seen.
    rate = base.mark_rule(strokeDash=[5, 4], color=GREY, strokeWidth=1.5).encode(y=alt.Y("rate:Q"))
    link = base.mark_rule(strokeDash=[2, 2], color=GREY, strokeWidth=1.5).encode(y=alt.Y("link:Q"))
    layers = alt.layer(rate, link, *curve(base, look, y, ("bus", "bus_low", "bus_high"), colour, tips))
    return facet(layers, of_fabric(look), look, "bus").resolve_scale(y="independent")


def variants(data: Any, look: Look) -> Any:
    # Not the colours of the fabrics on the plots above.
    colours = [PALETTE[(i + 3) % len(PALETTE)] for i in range(len(look.variants))]
    colour = Colour("variant", alt.Scale(domain=list(look.variants), range=colours), legend())
    tips = hover(
        alt.Tooltip("variant:N", title="method"),
        *interval("images_s", "images_low", "images_high", "images/s", ",.4~r"),
        alt.Tooltip("ideal:Q", title="ideal", format=",.4~r"),
        alt.Tooltip("data_wait:Q", title="data wait, ms", format=",.3~r"),
    )
    return facet(images_over_nodes(data, look, colour, tips), of_fabric(look), look, "variants")


def facet(layers: Any, by: Any, look: Look, name: str) -> Any:
    kind = "total batch" if look.strong else "batch"
    panels = layers.properties(width=280, height=230).facet(facet=by, columns=3)
    return panels.transform_calculate(panel=f"'{kind} ' + datum.group").properties(title=look.title(name))


CHARTS: dict[str, Callable[[Any, Look], Any]] = {
    "throughput": throughput,
    "efficiency": efficiency,
    "split": split,
    "bus": bus,
    "variants": variants,
}
# These show one batch at a time: another facet level would make the panels too small.
ONE_BATCH = {"split", "bus", "variants"}


def look_for(table: Table, family: Family, constructed: bool = False) -> Look:
    points = table.of(family)
    families = [other for other in table.families if other.hardware == family.hardware]
    return make_look(table, points, families, family.label, caveat(family, points, constructed))


def make_look(
    table: Table, points: Sequence[MergedPoint], families: Sequence[Family], subject: str, caveat: str
) -> Look:
    by_rate = sorted({(point.rate_gbps, point.fabric_label) for point in table.points})
    fabrics = tuple(dict.fromkeys(name for _, name in by_rate))
    variants = tuple(dict.fromkeys(family.variant for family in families))
    log_nodes = max(point.nodes for point in points) > 40
    return Look(fabrics, variants, subject, caveat, log_nodes, table.strong)


def charts_for(
    table: Table, family: Family, constructed: bool = False, limits: dict[str, str] | None = None
) -> dict[str, Any]:
    """Every chart that has something to show for one family, with its rows inside."""
    look = look_for(table, family, constructed)
    batches = sorted({point.group for point in table.of(family)})
    middle = batches[(len(batches) - 1) // 2]
    # The comparison of variants also needs the other families on the same hardware.
    points = [point for point in table.points if point.family.hardware == family.hardware]
    rows = [row(point, (limits or {}).get(point.trials[0].id, "")) for point in points]
    out = {}
    for name, make in CHARTS.items():
        shown = [line for line in rows if wanted(name, line, family.variant)]
        if name in ONE_BATCH:
            shown = [line for line in shown if line["group"] == middle]
        if name == "variants" and len({line["variant"] for line in shown}) < 2:
            continue
        if shown:
            lines = frozenset(field for field in LINES.get(name, ()) if any(line[field] is not None for line in shown))
            counts = tuple({line["nodes"] for line in shown})
            out[name] = make(alt.InlineData(values=shown), replace(look, lines=lines, nodes=counts))
    return out


def wanted(name: str, line: Row, variant: str) -> bool:
    """Whether a row belongs on a chart. report.js has the same rules."""
    rules = {
        "efficiency": line["efficiency"] is not None,
        "split": line["compute"] is not None,
        "bus": line["bus"] is not None and line["nodes"] > 1,
    }
    return name == "variants" or (line["variant"] == variant and rules.get(name, True))
