"""Several runs side by side: the same training in different environments, over GPUs in all, batch by batch.

A curve is one run on one fabric, so curves never mix kinds of devices; emulated ones say so in their name.
"""

from __future__ import annotations

import html
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import altair as alt

from bench import words
from bench.report import plots
from bench.results.points import MODEL_NAMES, Place
from bench.results.runs import Run
from cluster.core.errors import UserError


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


def curve_name(run: Run, place: Place, engines: int) -> str:
    env = str(run.provenance.get("env") or "")
    name = f"{env}/{run.name}" if env and env != run.name else run.name
    parts = [name, words.fabric(place.fabric)]
    if engines > 1:
        parts.append(place.family.variant)
    if place.family.kind != "cuda":
        parts.append(f"{place.family.kind} {place.family.device_name}" if place.family.kind == "emulated" else "CPU")
    if run.provenance.get("constructed"):
        parts.append("(constructed example)")
    return " ".join(parts)


def cells(runs: list[Run]) -> list[Cell]:
    found: list[Cell] = []
    for run in runs:
        places = run.table().places
        engines = len({place.family.variant for place in places})
        single: dict[tuple[str, str, int], float] = {}
        named = [(curve_name(run, place, engines), place) for place in places]
        for curve, place in named:
            if place.gpus == 1:
                single[(curve, place.family.model, place.batch)] = place.ips.median
        for curve, place in named:
            # One GPU needs no network, so any fabric's one-GPU point of the run will do.
            key = (curve, place.family.model, place.batch)
            base = single.get(key) or next((rate for other, rate in single.items() if other[1:] == key[1:]), None)
            share = place.ips.median / (place.gpus * base) if base else None
            ips = place.ips
            found.append(Cell(curve, place.family.model, place.batch, place.gpus, ips.median, ips.low, ips.high, share))
    if not found:
        raise UserError("RUN: none of these runs holds a measured point; name runs with results")
    names = [(cell.curve, cell.model, cell.batch, cell.gpus) for cell in found]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"RUN: {name[0]} has two values for {name[3]} GPUs, batch {name[2]}; name each run once")
    return found


def charts(found: list[Cell], model: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {
            "environment": cell.curve,
            "batch": f"batch {cell.batch}",
            "gpus": cell.gpus,
            "images_s": cell.images_s,
            "low": cell.low,
            "high": cell.high,
            "efficiency": cell.efficiency,
        }
        for cell in found
        if cell.model == model
    ]
    curves = sorted({row["environment"] for row in rows})
    colour = alt.Color(
        "environment:N",
        scale=plots.fabric_scale(curves),
        legend=alt.Legend(title=None, orient="bottom", columns=2, labelLimit=0),
    )
    x = alt.X("gpus:Q", title="GPUs", axis=alt.Axis(format="d", tickMinStep=1, grid=False), scale=alt.Scale(zero=False))
    batches = sorted({row["batch"] for row in rows}, key=lambda text: int(text.split()[1]))
    facet = alt.Facet("batch:N", title=None, sort=batches, header=plots.HEADER)
    out = {}
    for name, field, title in (
        ("throughput", "images_s", "images/s"),
        ("efficiency", "efficiency", "share of one GPU's rate"),
    ):
        scale = alt.Scale(zero=True) if name == "throughput" else alt.Scale(domainMin=0)
        y = alt.Y(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(format="%" if name == "efficiency" else "~s"))
        base = alt.Chart(alt.InlineData(values=rows)).encode(x=x, y=y, color=colour)
        lines = base.mark_line() + base.mark_point(filled=True, size=45)
        out[name] = lines.properties(width=280, height=230).facet(facet, columns=3)
    return out


def tables(found: list[Cell]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Per model and batch: title, head, rows."""
    groups: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in found:
        groups[(cell.model, cell.batch)].append(cell)
    out = []
    for (model, batch), members in sorted(groups.items()):
        curves = sorted({cell.curve for cell in members})
        known = {(cell.curve, cell.gpus): cell for cell in members}
        rows = []
        for gpus in sorted({cell.gpus for cell in members}):
            row = [str(gpus)]
            for curve in curves:
                row.append(written(known.get((curve, gpus))))
            rows.append(row)
        out.append((f"{MODEL_NAMES.get(model, model)}, batch {batch} per GPU", ["GPUs", *curves], rows))
    return out


def written(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    share = "" if cell.efficiency is None else f" ({words.percent(cell.efficiency)})"
    return f"{words.significant(cell.images_s)}{share}"


STYLE = "figure svg { max-width: 100%; height: auto; background: #fff; }"
HEAD = "Side by side: images/s, and in brackets the share of what as many single GPUs would reach"


def markdown(runs: list[Run]) -> str:
    from bench.report.page import markdown as plain

    lines = [f"# {HEAD}", ""]
    for title, head, rows in tables(cells(runs)):
        lines += [f"## {plain(title)}", "", "| " + " | ".join(map(plain, head)) + " |", "|---:" * len(head) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    return "\n".join(lines)


def page(runs: list[Run]) -> str:
    """One page without scripts: the plots are drawn here."""
    import vl_convert

    from bench.report.page import asset

    found = cells(runs)
    parts = []
    for model in sorted({cell.model for cell in found}):
        for name, chart in charts(found, model).items():
            svg = vl_convert.vegalite_to_svg(chart.to_dict(validate=False), config=plots.style())
            title = html.escape(f"{MODEL_NAMES.get(model, model)}: {name}")
            parts.append(
                f'<figure class="wide" role="img" aria-label="{title}"><figcaption>{title}</figcaption>{svg}</figure>'
            )
    for title, head, rows in tables(found):
        top = "".join(f"<th>{html.escape(word)}</th>" for word in head)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(word)}</td>" for word in row) + "</tr>" for row in rows)
        parts.append(
            f'<h2>{html.escape(title)}</h2><div class="scroll"><table><thead><tr>{top}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Side by side</title><style>{asset('report.css')}\n{STYLE}</style></head>"
        f"<body><main><h1>{html.escape(HEAD)}</h1>{''.join(parts)}</main></body></html>\n"
    )
