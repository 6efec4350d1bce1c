"""The result of bench elastic: faults.jsonl, a table in report.md, and images per second around faults in dip.svg."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.elastic.trace import Recovery
from bench.worker.step_statistics import median_interval
from cluster.core import files
from cluster.core.contract import Contract

T = TypeVar("T")
RECORDS, CHECKS, TABLE, PLOT = "faults.jsonl", "checks.jsonl", "report.md", "dip.svg"
COLUMNS = ("fault", "n", "next step after s (95%)", "without a step s", "steps lost", "nodes", "images/s")


@dataclass(frozen=True)
class Measured:
    """series: seconds since the fault -> images per second."""

    fault: str
    round: int
    node: str
    at: float
    recovery: Recovery
    series: list[tuple[float, float]]


@dataclass(frozen=True)
class Checked:
    """Whether the training of a run was right in spite of the faults: trace.problems."""

    run: str
    steps: int
    images: int
    problems: list[str]

    def __str__(self) -> str:
        found = "; ".join(self.problems[:5])
        right = "all processes had the same weights after each, went on from the last commit after each fault, "
        right += f"and used each of {self.images} images once per epoch"
        return f"Run {self.run}, {self.steps} steps: {found or right}."


def append(folder: Path, name: str, one: Measured | Checked) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a") as file:
        file.write(json.dumps(asdict(one)) + "\n")


def read(folder: Path, name: str, kind: type[T]) -> list[T]:
    """What an earlier measurement wrote, so that another one can go on."""
    file = folder / name
    lines = files.text(file).splitlines() if file.exists() else []
    return [files.answer(line, str(file), kind) for line in lines]


def cells(name: str, found: list[Recovery]) -> list[str]:
    seconds = [one.seconds for one in found]
    low, high = median_interval(seconds)
    lost = [one.steps_lost for one in found]
    sizes = " or ".join(sorted({f"{one.nodes_before} to {one.nodes_after}" for one in found}))
    before, after = (statistics.median(values) for values in zip(*((o.before, o.after) for o in found), strict=True))
    return [
        *(name, str(len(found)), f"{statistics.median(seconds):.1f} ({low:.1f}-{high:.1f})"),
        *(f"{statistics.median(one.stood for one in found):.1f}", f"{statistics.median(lost):g} (max {max(lost)})"),
        *(sizes, f"{before:.0f} to {after:.0f}"),
    ]


def table(measured: list[Measured]) -> str:
    names = dict.fromkeys(one.fault for one in measured)
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    rows += [cells(name, [one.recovery for one in measured if one.fault == name]) for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def caveat(contract: Contract) -> str:
    if contract.provider != "local":
        return ""
    return (
        "\nThe nodes are containers of one machine and train on its cores: a lost node's cores help the others, so "
        "images/s before and after do not compare nodes. Start-up of a rank (torch's import) is part of every return.\n"
    )


def chart(measured: list[Measured]) -> Any:
    import altair as alt

    from bench import charts

    rows = [
        {"fault": one.fault, "round": one.round, "seconds": seconds, "images_s": images}
        for one in measured
        for seconds, images in one.series
    ]
    line = alt.Chart().mark_line(opacity=0.6, color=charts.PALETTE[1])
    line = line.encode(
        x=alt.X("seconds:Q", title="seconds since the fault or its repair"),
        y=alt.Y("images_s:Q", title="images/s"),
        detail="round:N",
    )
    zero = alt.Chart().mark_rule(color=charts.GREY, strokeDash=[4, 3]).encode(x=alt.datum(0))
    names = list(dict.fromkeys(one.fault for one in measured))
    layers = alt.layer(line, zero, data=alt.InlineData(values=rows)).properties(width=360, height=130)
    return layers.facet(facet=alt.Facet("fault:N", title=None, sort=names), columns=2)


def write(folder: Path, measured: list[Measured], contract: Contract) -> None:
    from bench import charts

    text = f"# Faults of an elastic run on {len(contract.compute)} nodes\n\n{table(measured)}\n{caveat(contract)}"
    checks = "".join(f"\n{one}\n" for one in read(folder, CHECKS, Checked))
    (folder / TABLE).write_text(f"{text}{checks}\n![Images per second around each fault]({PLOT})\n")
    charts.write(chart(measured), folder / PLOT)
