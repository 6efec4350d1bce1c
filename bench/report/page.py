"""Turn a run into report.html and report.md."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

import altair as alt
import jinja2
import vl_convert
from markupsafe import Markup

from bench import charts, words
from bench.explain import diagnosis, verdict
from bench.explain.verdict import Verdict
from bench.report import plots
from bench.report.rows import Row, row
from bench.results import dimensions
from bench.results.points import Family, MergedPoint, Table
from bench.results.runs import Run

MOST_ROWS = 500
MOST_COUNTS = 60
CAPTIONS = {
    "throughput": "Images per second over all GPUs; bars through the points are 95% intervals.",
    "efficiency": "Throughput divided by nodes times the throughput of one node at the same batch.",
    "split": "Median step: compute, and what did not overlap with it. The thin line on top is the step's 95% interval.",
    "bus": "2(n-1)/n times the gradient bytes over the communication time; a collective that fills the link "
    "reaches the link's line.",
    "variants": "The same hardware with another engine, compression or data source.",
}
CELLS: list[dict[str, str]] = [
    {"title": "fabric", "field": "fabric", "kind": "text"},
    {"title": "nodes", "field": "nodes", "kind": "whole"},
    {"title": "batch", "field": "batch", "kind": "whole"},
    {"title": "images/s (95%)", "field": "images_s", "kind": "number", "low": "images_low", "high": "images_high"},
    {"title": "efficiency (95%)", "field": "efficiency", "kind": "share", "low": "eff_low", "high": "eff_high"},
    {"title": "of one GPU", "field": "eff_gpu", "kind": "share"},
    {"title": "step ms (95%)", "field": "step_ms", "kind": "number", "low": "step_low", "high": "step_high"},
    {"title": "compute", "field": "compute", "kind": "number"},
    {"title": "exposed comm", "field": "exposed_comm", "kind": "number"},
    {"title": "data wait", "field": "data_wait", "kind": "number"},
    {"title": "straggler wait", "field": "straggler_wait", "kind": "number"},
    {"title": "bus Gbit/s", "field": "bus", "kind": "number", "low": "bus_low", "high": "bus_high"},
    {"title": "link Gbit/s", "field": "link", "kind": "number"},
    {"title": "host CPU %", "field": "cpu", "kind": "number"},
    {"title": "s", "field": "scale", "kind": "number"},
    {"title": "limit", "field": "limit", "kind": "text"},
    {"title": "trial", "field": "id", "kind": "text"},
]
METHOD = (
    "Medians over steps with 95% intervals; where a point was repeated, the median of the repeats and an interval that "
    "covers all of theirs. Figures with a dotted underline are predicted, everything else is measured or follows from "
    "measured values."
)


@dataclass
class Report:
    run: Run
    table: Table
    verdict: Verdict
    # One per family; the first is the report's.
    verdicts: dict[Family, Verdict]
    limits: dict[str, str]

    @property
    def constructed(self) -> bool:
        return bool(self.run.provenance.get("constructed"))


def make(run: Run) -> Report:
    table = run.table()
    limits = {
        point.trials[0].id: "" if point.nodes == 1 and not point.breakdown else diagnosis.diagnose(point).label
        for point in table.points
    }
    verdicts = verdict.judge_families(table)
    return Report(run, table, next(iter(verdicts.values()), None) or verdict.judge(table), verdicts, limits)


@cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, from the package that also renders the PNG files."""
    # The type stubs require a snippet; the function has a default, which we use.
    text: str = vl_convert.javascript_bundle(vl_version=vegalite_version())  # type: ignore[call-arg]
    return text.replace("</script", "<\\/script")


def vegalite_version() -> str:
    """The newest version of vl-convert that is not newer than the schema of Altair."""
    wanted = tuple(int(part) for part in alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    known = [tuple(int(part) for part in name.split(".")[:2]) for name in vl_convert.get_vegalite_versions()]
    best = max((version for version in known if version <= wanted), default=max(known))
    return ".".join(str(part) for part in best)


def asset(name: str) -> str:
    return resources.files("bench.report").joinpath("templates", name).read_text()


def script_json(value: Any) -> str:
    """JSON that cannot end its script element, whatever strings it contains."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def source_hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def markdown(value: object) -> str:
    """Plain text inside Markdown: no markup, no table breaks, no HTML."""
    text = " ".join(str(value).split())
    for sign in "\\`*_[]|#~":
        text = text.replace(sign, "\\" + sign)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def fence(value: str) -> str:
    ticks = "```"
    while ticks in value:
        ticks += "`"
    return f"{ticks}json\n{value}\n{ticks}"


def number(value: float | None) -> str:
    return "-" if value is None else words.significant(value, 4)


def share(value: float | None) -> str:
    return "-" if value is None else words.tenths(value)


def environment() -> jinja2.Environment:
    loader = jinja2.PackageLoader("bench.report", "templates")
    env = jinja2.Environment(
        loader=loader,
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=False),
        undefined=jinja2.StrictUndefined,
    )
    env.filters.update(brief=words.brief, md=markdown, fence=fence, n=number, p=share)
    return env


def facts(report: Report) -> list[str]:
    """What is true of the run, whichever family is shown."""
    run = report.run
    out = [f"{len(run.trials)} trials"]
    if created := run.provenance.get("created"):
        out.append(str(created)[:19].replace("T", " "))
    elif run.trials:
        out.append(run.trials[0].started[:19].replace("T", " "))
    return out


def headline(judged: Verdict) -> str:
    point = judged.point
    return f"headline: {point.family.model_name}, batch {point.batch} per GPU" if point is not None else ""


def badges(report: Report) -> list[str]:
    out = []
    if report.constructed:
        out.append("constructed example")
    kinds = {point.family.kind for point in report.table.points} or {trial.kind for trial in report.run.trials}
    if "emulated" in kinds:
        out.append("emulated devices" if kinds == {"emulated"} else "partly emulated devices")
    return out


def cards(report: Report, judged: Verdict) -> list[dict[str, Any]]:
    """One per fabric: the largest cluster at the batch of the headline."""
    point = judged.point
    if point is None or point.nodes == 1:
        return []
    look = plots.look_for(report.table, point.family)
    found: dict[tuple[float, tuple[str, str]], MergedPoint] = {}
    for other in report.table.of(point.family):
        if other.group == point.group and other.nodes > 1:
            key = (other.rate_gbps, other.link)
            if key not in found or other.nodes > found[key].nodes:
                found[key] = other
    out = []
    for _, other in sorted(found.items())[:8]:
        name = other.fabric_label
        known = other.efficiency.median if other.efficiency else None
        tone = charts.PALETTE[look.fabrics.index(name) % len(charts.PALETTE)]
        out.append(
            {
                "fabric": other.fabric,
                "title": f"{name}, {other.nodes} nodes",
                "big": words.percent(known) if known is not None else words.significant(other.ips.median),
                "unit": "efficiency" if known is not None else "images/s",
                "share": known,
                "width": round(100 * min(1.0, known or 0), 1),
                "tone": tone,
                "facts": f"{words.significant(other.ips.median)} images/s · limit: "
                f"{report.limits[other.trials[0].id] or 'not known'}",
            }
        )
    return out


def shown_verdict(report: Report, judged: Verdict) -> dict[str, Any]:
    """What the page shows of a verdict, for its script: the same as the template writes for the first family."""
    return {
        "limit": judged.limit,
        "parts": [asdict(part) for part in judged.parts],
        "findings": judged.findings,
        "cards": cards(report, judged),
        "headline": headline(judged),
    }


def sources(run: Run) -> dict[str, str]:
    out = {}
    parts = {**{name.removesuffix(".json"): content for name, content in run.environments.items()}, "plan": run.plan}
    for name, value in {**parts, "capacities": run.capacities}.items():
        if value:
            text = json.dumps(value, indent=2, ensure_ascii=False)
            out[name] = text if len(text) < 100_000 else text[:100_000] + "\n... shortened"
    return out


def cell(form: dict[str, str], line: Row) -> tuple[str, str, bool]:
    value = line[form["field"]]
    if form["kind"] == "text":
        return str(value), "", True
    write = share if form["kind"] == "share" else number
    between = ""
    if "low" in form and line[form["low"]] is not None:
        between = f"{write(line[form['low']])} to {write(line[form['high']])}"
    if form["kind"] == "whole":
        return f"{value:,}", between, False
    return write(value), between, False


def html(report: Report) -> str:
    table = report.table
    families = table.families
    grouped: dict[tuple[str, str, int, str], list[Row]] = defaultdict(list)
    by_family: dict[Family, list[MergedPoint]] = defaultdict(list)
    for point in table.points:
        grouped[point.family.hardware].append(row(point, report.limits[point.trials[0].id]))
        by_family[point.family].append(point)
    groups = list(grouped)
    described = [
        {
            "label": family.label,
            "variant": family.variant,
            "group": groups.index(family.hardware),
            "caveat": charts.caveat(family, by_family[family], report.constructed),
            **shown_verdict(report, judged),
        }
        for family, judged in report.verdicts.items()
    ]
    # With one GPU per node, the efficiency relative to one GPU is the same as to one node.
    cells = [form for form in CELLS if form["field"] != "eff_gpu" or any(f.gpus_per_node > 1 for f in families)]
    lines: list[Row] = []
    specs: dict[str, Any] = {}
    if families:
        lines = [line for line in grouped[families[0].hardware] if line["variant"] == families[0].variant]
        # Chart descriptions without rows. The page adds the rows and texts of the selected family.
        specs = specs_for(plots.make_look(table, table.points, families, subject="", caveat=" "))
    data = {
        "columns": list(grouped[groups[0]][0]) if groups else [],
        "rows": [[list(line.values()) for line in group] for group in grouped.values()],
        "families": described,
        "specs": specs,
        "titles": plots.TITLES,
        "lines": plots.LINES,
        "most_ticks": plots.MOST_TICKS,
        "one_batch": sorted(plots.ONE_BATCH),
        "by_batch": [name for name in plots.CHARTS if name not in plots.ONE_BATCH],
        "style": {"light": charts.style(), "dark": charts.style(dark=True)},
        "grey": charts.GREY,
        "cells": cells,
        "most_rows": MOST_ROWS,
        "strong": table.strong,
        "most_counts": MOST_COUNTS,
    }
    more = (
        f"First {MOST_ROWS} of {len(lines)} points; bench export writes all of them." if len(lines) > MOST_ROWS else ""
    )
    script = asset("report.js")
    return render(
        "report.html.j2",
        report,
        facts=facts(report),
        headline=headline(report.verdict),
        cards=cards(report, report.verdict),
        families=described,
        captions=CAPTIONS,
        titles=plots.TITLES,
        cells=cells,
        lines=[[cell(form, line) for form in cells] for line in lines[:MOST_ROWS]],
        more=more,
        failed_more=f"First {MOST_ROWS} of {len(table.failed)}." if len(table.failed) > MOST_ROWS else "",
        strong=table.strong,
        css=asset("report.css"),
        data=script_json(data),
        library=library(),
        script=script,
        hashes=Markup(" ".join(source_hash(text) for text in (library(), script))),  # noqa: S704 - made of base64 only
    )


@cache
def specs_for(look: plots.Look) -> dict[str, Any]:
    rows = alt.NamedData(name="rows")
    return {name: chart(rows, look).to_dict(validate=False) for name, chart in plots.CHARTS.items()}


def markdown_page(report: Report) -> str:
    table = report.table
    tables: list[tuple[str, str, list[Row]]] = []
    left = MOST_ROWS
    for family in table.families:
        rows = [row(point, report.limits[point.trials[0].id]) for point in table.of(family)[:left]]
        left -= len(rows)
        if rows:
            said = report.verdicts[family].sentence if len(table.families) > 1 else ""
            tables.append((family.label, said, rows))
        if left <= 0:
            break
    more = f"First {MOST_ROWS} of {len(table.points)} points." if len(table.points) > MOST_ROWS else ""
    return render("report.md.j2", report, tables=tables, more=more)


def render(template: str, report: Report, **own: Any) -> str:
    failed = report.table.failed[:MOST_ROWS]
    names = dimensions.varying((trial.point for trial in report.run.trials), without=("fabric", "nodes", "batch"))
    return (
        environment()
        .get_template(template)
        .render(
            run=report.run,
            verdict=report.verdict,
            findings=report.verdict.findings,
            badges=badges(report),
            missing=verdict.missing(report.run, report.table),
            failed=failed,
            failed_names=names,
            failed_cells=[[dimensions.label(trial.point, [name]) for name in names] for trial in failed],
            method=METHOD,
            sources=sources(report.run),
            **own,
        )
    )
