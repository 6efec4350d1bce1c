"""The report of `bench converge`: accuracy against time and samples, staleness, and the answers."""

from __future__ import annotations

from typing import Any

import altair as alt
import jinja2

from bench.charts import colour_scale, style
from bench.converge import analysis
from bench.report.page import asset, markdown

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("bench.report", "templates"), autoescape=jinja2.select_autoescape(["html", "j2"])
)
HEAD = (
    *("engine", "fabric", "nodes", "batch", "learning rate", "s to target (95%)", "samples to target (95%)"),
    *("step ms (predicted)", "staleness: mean, largest", "bytes sent / expected"),
)


def caveat(result: dict[str, Any]) -> str:
    plan, rows = result["plan"], result["curves"]
    speeds = sorted({row["speed"] for row in rows})
    profile = plan["device"].partition(":")[2].upper()
    return (
        f"EMULATED time: compute is padded to {profile} with {plan['model']}, bytes and link rate are divided by "
        f"{rows[0]['scale']:.0f}, and time runs {speeds[0]:.1f} to {speeds[-1]:.1f} times faster. "
        "What is learnt is real: a small network on stand-in images."
    )


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    out = []
    for row in rows:
        missed = sum(run["reached_s"] is None for run in row["runs"])
        time, samples = (analysis.to_target(row, field) for field in ("reached_s", "reached_samples"))
        none, stale = f"missed by {missed} of {len(row['runs'])}", analysis.staleness(row)
        expected = sum(run["expected_bytes"] for run in row["runs"])
        out.append(
            [
                *(
                    analysis.name(row),
                    row["fabric"],
                    str(row["nodes"]),
                    str(row["batch"]),
                    f"{row['learning_rate']:.3g}",
                ),
                *(str(time or none), str(samples or none)),
                f"{analysis.step_ms(row):.0f} ({row['predicted_step_ms']:.0f})",
                f"{stale[0]:.1f}, {stale[1]}" if stale else "-",
                f"{sum(run['sent_bytes'] for run in row['runs']) / expected:.2f}" if expected else "-",
            ]
        )
    return out


def charts(result: dict[str, Any]) -> dict[str, alt.TopLevelMixin]:
    plan = result["plan"]
    points = [
        {
            "engine": analysis.name(row) + ("" if row["batch"] == plan["batch"] else f", batch {row['batch']}"),
            "where": f"{row['fabric']}, {row['nodes']} nodes",
            "training": f"{row['engine']}-{row['batch']}-{run['seed']}",
            "seconds": seconds,
            "samples": samples,
            "accuracy": accuracy,
        }
        for row in result["curves"]
        for run in row["runs"]
        for seconds, samples, accuracy in zip(run["seconds"], run["samples"], run["accuracy"], strict=True)
    ]
    names = list(dict.fromkeys(point["engine"] for point in points))
    colour = alt.Color("engine:N", scale=colour_scale(names), legend=alt.Legend(title=None, orient="bottom", columns=4))
    y = alt.Y("accuracy:Q", axis=alt.Axis(format="%"), title="accuracy on held-out images")
    target = alt.Chart().mark_rule(strokeDash=[4, 4], color="#8a94a6").encode(y=alt.datum(plan["target"]))
    title = alt.TitleParams(" ", subtitle=caveat(result).split(". "))
    drawn = {}
    for field, text in (("seconds", "emulated seconds"), ("samples", "images trained on")):
        lines = (
            alt.Chart()
            .mark_line(opacity=0.75, strokeWidth=1.5)
            .encode(x=alt.X(f"{field}:Q", title=text), y=y, color=colour, detail="training:N")
        )
        layer = alt.layer(lines, target, data=alt.InlineData(values=points)).properties(width=360, height=260)
        drawn[f"accuracy-{field}"] = layer.facet(alt.Facet("where:N", title=None), columns=2).properties(title=title)
    counts = [
        {"engine": analysis.name(row), "where": f"{row['fabric']}, {row['nodes']} nodes", "updates": int(n), "count": c}
        for row in result["curves"]
        for run in row["runs"]
        for n, c in run["staleness"].items()
    ]
    if counts:
        bars = (
            alt.Chart(alt.InlineData(values=counts))
            .mark_bar()
            .encode(
                x=alt.X("updates:O", title="updates of other ranks in between (staleness)"),
                y=alt.Y("sum(count):Q", title="updates"),
                color=alt.Color("engine:N", scale=colour_scale(names), legend=None),
            )
            .properties(width=360, height=160)
        )
        drawn["staleness"] = bars.facet(row=alt.Facet("engine:N", title=None), column=alt.Facet("where:N", title=None))
    return drawn


def parts(result: dict[str, Any]) -> dict[str, Any]:
    plan = result["plan"]
    return {
        "head": f"Does it learn? Accuracy {plan['target']:.0%} with {plan['seeds']} seeds per curve",
        "caveat": caveat(result),
        "answers": {question: said for question, said in result["answers"].items() if said},
        "columns": HEAD,
        "rows": table(result["curves"]),
    }


def markdown_page(result: dict[str, Any]) -> str:
    TEMPLATES.filters["md"] = markdown
    return TEMPLATES.get_template("converge.md.j2").render(**parts(result))


def page(result: dict[str, Any]) -> str:
    import vl_convert

    figures = [
        {"title": name.replace("-", " against "), "svg": vl_convert.vegalite_to_svg(chart.to_dict(), config=style())}
        for name, chart in charts(result).items()
    ]
    css = asset("report.css")
    return TEMPLATES.get_template("converge.html.j2").render(css=css, figures=figures, **parts(result))
