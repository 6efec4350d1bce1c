"""The plots of a report, as Altair charts. One description of each serves the page, PNG, SVG and the notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from bench import words
from bench.results.points import Family, Place, Table

Row = dict[str, Any]

# Okabe-Ito: told apart by colour-blind readers, and readable on white and on near-black.
PALETTE = ["#e8743b", "#3b82d6", "#1fa187", "#b05cc6", "#c9a227", "#7a869a", "#d6497f", "#5b6ee1"]
PARTS = {
    "compute": ("compute", "#5b9bd5"),
    "exposed_comm": ("exposed communication", "#e8743b"),
    "data_wait": ("data wait", "#b05cc6"),
    "straggler_wait": ("straggler wait", "#c9a227"),
}
GREY = "#8a94a6"
TITLES = {
    "throughput": "Throughput (dashed: ideal)",
    "efficiency": "Scaling efficiency: share of the ideal throughput",
    "split": "Where the time of a step goes",
    "bus": "All-reduce bus bandwidth (dashed: link rate, dotted: link as measured)",
    "variants": "Ways to train compared (dashed: ideal)",
}
HEADER = alt.Header(labelFontSize=13, labelFontWeight="bold", labelPadding=4)

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


def row(place: Place, limit: str = "") -> Row:
    parts, efficiency, bus = place.breakdown, place.efficiency, place.bus_gbps
    return {
        "fabric": words.fabric(place.fabric),
        "rate": place.rate_gbps,
        "nodes": place.nodes,
        "gpus": place.gpus,
        "batch": place.batch,
        "group": place.group,
        "variant": place.family.variant,
        "images_s": short(place.ips.median),
        "images_low": short(place.ips.low),
        "images_high": short(place.ips.high),
        "ideal": short(place.ideal),
        "efficiency": short(efficiency.median) if efficiency else None,
        "eff_low": short(efficiency.low) if efficiency else None,
        "eff_high": short(efficiency.high) if efficiency else None,
        "eff_gpu": short(place.efficiency_gpu),
        "step_ms": short(place.step_ms.median),
        "step_low": short(place.step_ms.low),
        "step_high": short(place.step_ms.high),
        "compute": short(parts.compute) if parts else None,
        "exposed_comm": short(parts.exposed_comm) if parts else None,
        "data_wait": short(parts.data_wait) if parts else None,
        "straggler_wait": short(parts.straggler_wait) if parts else None,
        "bus": short(bus.median) if bus else None,
        "bus_low": short(bus.low) if bus else None,
        "bus_high": short(bus.high) if bus else None,
        "link": short(place.link_gbps),
        "cpu": short(place.host_cpu),
        "scale": short(place.scale),
        # Not checked counts as sound: only a failed check is a reason for doubt.
        "converged": place.converged is not False,
        "repeats": len(place.trials),
        "limit": limit,
        "stragglers": words.several(place.stragglers, 5) if place.stragglers else "",
        "id": place.trials[0].id,
    }


def caveat(family: Family, places: Sequence[Place], constructed: bool = False) -> str:
    """What must be said on the plot itself, so that a copied picture still says it."""
    said = []
    if constructed:
        said.append("CONSTRUCTED example")
    if family.kind == "emulated":
        factors = span("s", [place.scale for place in places])
        if any((place.slowdown or 1) != 1 for place in places):
            factors += span("t", [place.slowdown for place in places])
        said.append(f"EMULATED {family.device_name} (scale model{factors})")
        if any(place.converged is False for place in places):
            said.append("hollow: differs at 2s")
    elif family.kind == "cpu":
        said.append("trained on CPUs")
    return ", ".join(said)


def span(name: str, values: Sequence[float | None]) -> str:
    """A factor of the scale model, as it goes into a caveat; nothing where no point has it."""
    known = sorted({value for value in values if value is not None})
    if not known:
        return ""
    return f", {name} = {known[0]:g}" + (f" to {known[-1]:g}" if len(known) > 1 else "")


def fabric_scale(fabrics: Sequence[str]) -> alt.Scale:
    return alt.Scale(domain=list(fabrics), range=[PALETTE[i % len(PALETTE)] for i in range(len(fabrics))])


@dataclass(frozen=True)
class Look:
    """What a chart needs to know beside its rows."""

    fabrics: tuple[str, ...]
    variants: tuple[str, ...]
    subject: str
    caveat: str
    width: int = 280
    height: int = 230
    log_nodes: bool = False
    strong: bool = False

    def title(self, text: str) -> alt.TitleParams:
        lines = [line for line in (self.subject, self.caveat) if line]
        plain: dict[str, Any] = {} if self.caveat else {"subtitleColor": GREY}
        return alt.TitleParams(
            text=text,
            subtitle=lines,
            anchor="start",
            fontSize=16,
            subtitleFontSize=12,
            subtitlePadding=5,
            offset=14,
            **plain,
        )


@dataclass(frozen=True)
class Colour:
    field: str
    scale: alt.Scale
    legend: alt.Legend | None


def nodes_axis(look: Look) -> alt.X:
    scale = (
        alt.Scale(type="log", base=2, nice=False, padding=14)
        if look.log_nodes
        else alt.Scale(zero=False, nice=False, padding=14)
    )
    return alt.X("nodes:Q", title="nodes", scale=scale, axis=alt.Axis(format="d", tickMinStep=1, grid=False))


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
        # A larger unseen target, so that a finger can hit a point too.
        base.mark_point(size=420, opacity=0, filled=True).encode(x=x, y=f"{median}:Q", tooltip=tips),
    ]


def legend(title: str | None = None) -> alt.Legend:
    return alt.Legend(
        orient="top",
        title=title,
        symbolType="stroke",
        symbolStrokeWidth=4,
        symbolSize=140,
        symbolOpacity=1,
        labelLimit=300,
    )


def of_batch() -> alt.Facet:
    return alt.Facet("panel:N", title=None, sort=alt.EncodingSortField("group", op="min"), header=HEADER)


def of_fabric(look: Look) -> alt.Facet:
    return alt.Facet("fabric:N", title=None, sort=list(look.fabrics), header=HEADER)


def throughput(data: Any, look: Look) -> Any:
    colour = Colour("fabric", fabric_scale(look.fabrics), legend())
    y = alt.Y(
        "images_s:Q", title="images/s, all GPUs", scale=alt.Scale(zero=True), axis=alt.Axis(format=",~f", tickCount=6)
    )
    tips = hover(
        alt.Tooltip("images_s:Q", title="images/s", format=",.4~r"),
        alt.Tooltip("images_low:Q", title="95% from", format=",.4~r"),
        alt.Tooltip("images_high:Q", title="to", format=",.4~r"),
        alt.Tooltip("ideal:Q", title="ideal", format=",.4~r"),
        alt.Tooltip("efficiency:Q", title="efficiency", format=".1%"),
    )
    ideal = (
        alt.Chart(data)
        .mark_line(strokeDash=[5, 4], color=GREY, strokeWidth=1.5)
        .encode(x=nodes_axis(look), y=alt.Y("ideal:Q"), detail="fabric:N")
    )
    layers = alt.layer(ideal, *curve(alt.Chart(data), look, y, ("images_s", "images_low", "images_high"), colour, tips))
    return facet(layers, of_batch(), look, TITLES["throughput"])


def efficiency(data: Any, look: Look) -> Any:
    colour = Colour("fabric", fabric_scale(look.fabrics), legend())
    y = alt.Y(
        "efficiency:Q",
        title="scaling efficiency",
        scale=alt.Scale(domain=[0, 1.05], clamp=True),
        axis=alt.Axis(format="%", values=[0, 0.25, 0.5, 0.75, 1], labelOverlap=False),
    )
    tips = hover(
        alt.Tooltip("efficiency:Q", title="efficiency", format=".1%"),
        alt.Tooltip("eff_low:Q", title="95% from", format=".1%"),
        alt.Tooltip("eff_high:Q", title="to", format=".1%"),
        alt.Tooltip("eff_gpu:Q", title="against one GPU", format=".1%"),
        alt.Tooltip("images_s:Q", title="images/s", format=",.4~r"),
    )
    ideal = alt.Chart(data).mark_rule(strokeDash=[5, 4], color=GREY, strokeWidth=1.5).encode(y=alt.datum(1))
    layers = alt.layer(ideal, *curve(alt.Chart(data), look, y, ("efficiency", "eff_low", "eff_high"), colour, tips))
    return facet(layers, of_batch(), look, TITLES["efficiency"])


def split(data: Any, look: Look) -> Any:
    names = list(PARTS)
    scale = alt.Scale(domain=[PARTS[name][0] for name in names], range=[PARTS[name][1] for name in names])
    labels = "{" + ", ".join(f"{name}: '{PARTS[name][0]}'" for name in names) + "}"
    base = alt.Chart(data)
    x = alt.X("nodes:O", title="nodes", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    bars = (
        base.transform_fold([*names], as_=["part", "ms"])
        .transform_calculate(what=f"({labels})[datum.part]", order=f"indexof({names}, datum.part)")
        .mark_bar()
        .encode(
            x=x,
            y=alt.Y("ms:Q", title="ms per step", stack="zero"),
            color=alt.Color(
                "what:N",
                scale=scale,
                legend=alt.Legend(orient="top", title=None, columns=2, labelLimit=300, symbolType="square"),
            ),
            order=alt.Order("order:Q"),
            tooltip=hover(
                alt.Tooltip("what:N", title="part"),
                alt.Tooltip("ms:Q", title="ms", format=",.4~r"),
                alt.Tooltip("step_ms:Q", title="step ms", format=",.4~r"),
                alt.Tooltip("step_low:Q", title="95% from", format=",.4~r"),
                alt.Tooltip("step_high:Q", title="to", format=",.4~r"),
                alt.Tooltip("stragglers:N", title="slow nodes"),
            ),
        )
    )
    whisker = base.mark_rule(color=GREY, strokeWidth=2).encode(x=x, y=alt.Y("step_low:Q"), y2="step_high:Q")
    return facet(alt.layer(bars, whisker), of_fabric(look), look, TITLES["split"])


def bus(data: Any, look: Look) -> Any:
    base = alt.Chart(data).transform_filter("datum.nodes > 1 && isValid(datum.bus)")
    colour = Colour("fabric", fabric_scale(look.fabrics), None)
    y = alt.Y("bus:Q", title="Gbit/s", scale=alt.Scale(zero=True), axis=alt.Axis(format="~r"))
    x = nodes_axis(look)
    tips = hover(
        alt.Tooltip("bus:Q", title="bus bandwidth, Gbit/s", format=".3~r"),
        alt.Tooltip("bus_low:Q", title="95% from", format=".3~r"),
        alt.Tooltip("bus_high:Q", title="to", format=".3~r"),
        alt.Tooltip("link:Q", title="link measured, Gbit/s", format=".3~r"),
        alt.Tooltip("rate:Q", title="link rate, Gbit/s", format=".3~r"),
    )
    rate = base.mark_line(strokeDash=[5, 4], color=GREY, strokeWidth=1.5).encode(x=x, y=alt.Y("rate:Q"))
    link = base.mark_line(strokeDash=[2, 2], color=GREY, strokeWidth=1.5).encode(x=x, y=alt.Y("link:Q"))
    layers = alt.layer(rate, link, *curve(base, look, y, ("bus", "bus_low", "bus_high"), colour, tips))
    return facet(layers, of_fabric(look), look, TITLES["bus"]).resolve_scale(y="independent")


def variants(data: Any, look: Look) -> Any:
    # Other colours than the fabrics have on the plots above.
    colours = [PALETTE[(i + 3) % len(PALETTE)] for i in range(len(look.variants))]
    scale = alt.Scale(domain=list(look.variants), range=colours)
    colour = Colour("variant", scale, legend())
    y = alt.Y(
        "images_s:Q", title="images/s, all GPUs", scale=alt.Scale(zero=True), axis=alt.Axis(format=",~f", tickCount=6)
    )
    tips = hover(
        alt.Tooltip("variant:N", title="way"),
        alt.Tooltip("images_s:Q", title="images/s", format=",.4~r"),
        alt.Tooltip("images_low:Q", title="95% from", format=",.4~r"),
        alt.Tooltip("images_high:Q", title="to", format=",.4~r"),
        alt.Tooltip("ideal:Q", title="ideal", format=",.4~r"),
        alt.Tooltip("data_wait:Q", title="data wait, ms", format=",.3~r"),
    )
    ideal = (
        alt.Chart(data)
        .mark_line(strokeDash=[5, 4], color=GREY, strokeWidth=1.5)
        .encode(x=nodes_axis(look), y=alt.Y("ideal:Q"), detail="variant:N")
    )
    layers = alt.layer(ideal, *curve(alt.Chart(data), look, y, ("images_s", "images_low", "images_high"), colour, tips))
    return facet(layers, of_fabric(look), look, TITLES["variants"])


def facet(layers: Any, by: Any, look: Look, title: str) -> Any:
    kind = "total batch" if look.strong else "batch"
    panels = layers.properties(width=look.width, height=look.height).facet(facet=by, columns=3)
    return panels.transform_calculate(panel=f"'{kind} ' + datum.group").properties(title=look.title(title))


CHARTS: dict[str, Callable[[Any, Look], Any]] = {
    "throughput": throughput,
    "efficiency": efficiency,
    "split": split,
    "bus": bus,
    "variants": variants,
}
# These take one batch at a time: another facet level would make the panels too small to read.
ONE_BATCH = {"split", "bus", "variants"}


def style(dark: bool = False) -> dict[str, Any]:
    ink, line = ("#e6e9ef", "#3a4252") if dark else ("#1c2430", "#dfe3ea")
    return {
        "background": "#12161d" if dark else "#ffffff",
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
        "axis": {
            "labelColor": ink,
            "titleColor": ink,
            "gridColor": line,
            "domainColor": line,
            "tickColor": line,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
        },
        "legend": {"labelColor": ink, "titleColor": ink, "labelFontSize": 13},
        "header": {"labelColor": ink, "titleColor": ink},
        "title": {"color": ink, "subtitleColor": "#f0b36b" if dark else "#9a5410"},
        "view": {"stroke": None},
    }


def look_for(table: Table, family: Family, constructed: bool = False) -> Look:
    places = table.of(family)
    by_rate = sorted({(place.rate_gbps, words.fabric(place.fabric)) for place in table.places})
    fabrics = tuple(dict.fromkeys(name for _, name in by_rate))
    known = tuple(dict.fromkeys(f.variant for f in table.families if f.hardware == family.hardware))
    most = max(place.nodes for place in places)
    return Look(
        fabrics=fabrics,
        variants=known,
        subject=family.label,
        caveat=caveat(family, places, constructed),
        log_nodes=most > 40,
        strong=table.strong,
    )


def middle_batch(places: Sequence[Place]) -> int:
    batches = sorted({place.group for place in places})
    return batches[(len(batches) - 1) // 2]


def charts_for(
    table: Table, family: Family, constructed: bool = False, limits: dict[str, str] | None = None
) -> dict[str, Any]:
    """Every chart that has something to show for one family, with its rows inside."""
    look = look_for(table, family, constructed)
    places = table.of(family)
    rows = rows_for(table, family, limits)
    batch = middle_batch(places)
    out = {}
    for name, make in CHARTS.items():
        shown = [line for line in rows if wanted(name, line, family.variant)]
        if name in ONE_BATCH:
            shown = [line for line in shown if line["group"] == batch]
        if name == "variants" and len({line["variant"] for line in shown}) < 2:
            continue
        if shown:
            out[name] = make(alt.InlineData(values=shown), look)
    return out


def wanted(name: str, line: Row, variant: str) -> bool:
    """Whether a row belongs on a chart; report.js asks the same question of the rows it is given."""
    if name == "variants":
        return True
    if line["variant"] != variant:
        return False
    if name == "efficiency":
        return line["efficiency"] is not None
    if name == "split":
        return line["compute"] is not None
    if name == "bus":
        return line["bus"] is not None and line["nodes"] > 1
    return True


def rows_for(table: Table, family: Family, limits: dict[str, str] | None = None) -> list[Row]:
    """Rows of the family and of the others on the same hardware, which the comparison of variants needs."""
    limits = limits or {}
    return [
        row(place, limits.get(place.trials[0].id, ""))
        for place in table.places
        if place.family.hardware == family.hardware
    ]


def save(charts: dict[str, Any], folder: Path, formats: Sequence[str], prefix: str = "") -> list[Path]:
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, chart in charts.items():
        spec = chart.to_dict()
        for kind in formats:
            path = folder / f"{prefix}{name}.{kind}"
            if kind == "png":
                path.write_bytes(vl_convert.vegalite_to_png(spec, scale=2, config=style()))
            else:
                path.write_text(vl_convert.vegalite_to_svg(spec, config=style()))
            written.append(path)
    return written
