"""What all our charts share: colours, style, the caveat printed on them, and how they are written to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from bench.results.points import Family, MergedPoint

# Colours that colour-blind readers can distinguish, on white and on near-black.
PALETTE = ["#e8743b", "#3b82d6", "#1fa187", "#b05cc6", "#c9a227", "#7a869a", "#d6497f", "#5b6ee1"]
GREY = "#8a94a6"


def caveat(family: Family, points: Sequence[MergedPoint], constructed: bool = False) -> str:
    """What the plot itself must say, so that a copy of it still does."""
    said = []
    if constructed:
        said.append("CONSTRUCTED example")
    if family.kind == "emulated":
        factors = span("s", [point.scale for point in points])
        if any((point.slowdown or 1) != 1 for point in points):
            factors += span("t", [point.slowdown for point in points])
        said.append(f"EMULATED {family.device_name} (scale model{factors})")
        if any(point.converged is False for point in points):
            said.append("hollow: differs at twice the scale factor")
    elif family.kind == "cpu":
        said.append("trained on CPUs")
    return ", ".join(said)


def span(name: str, values: Sequence[float | None]) -> str:
    """A factor of the scale model for a caveat; empty if no point has it."""
    known = sorted({value for value in values if value is not None})
    if not known:
        return ""
    return f", {name} = {known[0]:g}" + (f" to {known[-1]:g}" if len(known) > 1 else "")


def colour_scale(names: Sequence[str]) -> alt.Scale:
    return alt.Scale(domain=list(names), range=[PALETTE[i % len(PALETTE)] for i in range(len(names))])


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


def write(chart: alt.TopLevelMixin, path: Path) -> Path:
    """The suffix of the path is the format: png, svg, pdf, html or json."""
    import vl_convert

    if path.suffix == ".png":
        path.write_bytes(vl_convert.vegalite_to_png(chart.to_dict(), scale=2, config=style()))
    elif path.suffix == ".svg":
        path.write_text(vl_convert.vegalite_to_svg(chart.to_dict(), config=style()))
    else:
        chart.save(str(path))
    return path


def write_all(charts: dict[str, Any], folder: Path, formats: Sequence[str], prefix: str = "") -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    return [write(chart, folder / f"{prefix}{name}.{kind}") for name, chart in charts.items() for kind in formats]
