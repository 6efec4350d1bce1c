"""Write report.html and report.md: how the cluster scales, why, and what to change."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.core.errors import InfraError, UserError

if TYPE_CHECKING:
    from bench.results.runs import Run

FORMATS = ("png", "svg")


def configure(parser: argparse.ArgumentParser) -> None:
    text = "a run folder, or latest (default); several runs are shown side by side"
    parser.add_argument("run", metavar="RUN", nargs="*", default=["latest"], help=text)
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder (default: the run folder)")
    parser.add_argument("--plots", metavar="FORMATS", help="also write each plot: png, svg or png,svg (into DIR/plots)")
    parser.add_argument("--json", action="store_true", help="print the verdict and the files written as JSON")


@dataclass(frozen=True)
class Output:
    """What one report writes and prints. Charts are drawn only if the user wants them as files."""

    folder: Path
    html: str
    markdown: str
    charts: Callable[[], Iterator[tuple[str, dict[str, Any]]]]
    summary: dict[str, Any]
    text: str


def run(args: argparse.Namespace) -> int:
    # The plotting libraries take almost a second to import. `bench --help` does not need them.
    from bench import charts
    from bench.results import runs

    formats = wanted_formats(args.plots)
    found = [runs.load(name) for name in ([args.run] if isinstance(args.run, str) else args.run)]
    for one in found:
        runs.print_problems(one)
    output = one_run(found[0]) if len(found) == 1 else side_by_side(found, args.run)
    out: Path = args.out or output.folder
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = [write(out / "report.html", output.html), write(out / "report.md", output.markdown)]
        for prefix, drawn in output.charts() if formats else ():
            written += charts.write_all(drawn, out / "plots", formats, prefix)
    except OSError as error:
        raise InfraError(f"{out}: cannot write the report: {error.strerror}; free space or use --out DIR") from error
    if args.json:
        print(json.dumps({**output.summary, "files": [str(path) for path in written]}, indent=2))
    else:
        print(output.text, *(f"wrote {path}" for path in written), sep="\n")
    return 0


def one_run(loaded: Run) -> Output:
    from bench.report import page, plots

    report = page.make(loaded)

    def charts() -> Iterator[tuple[str, dict[str, Any]]]:
        for number, family in enumerate(report.table.families, start=1):
            drawn = plots.charts_for(report.table, family, report.constructed, report.limits)
            yield "" if number == 1 else f"{number}-", drawn

    summary = {"verdict": report.verdict.as_json()}
    text = report.verdict.sentence
    return Output(loaded.folder, page.html(report), page.markdown_page(report), charts, summary, text)


def side_by_side(loaded: list[Run], names: list[str]) -> Output:
    from bench.report import side_by_side
    from bench.results import store

    cells = side_by_side.cells(loaded)

    def charts() -> Iterator[tuple[str, dict[str, Any]]]:
        for model in sorted({cell.model for cell in cells}):
            yield f"{model}-", side_by_side.charts(cells, model)

    markdown = side_by_side.markdown(cells)
    folder = store.RESULTS / "side-by-side"
    return Output(folder, side_by_side.page(cells), markdown, charts, {"runs": names}, markdown)


def wanted_formats(text: str | None) -> list[str]:
    if text is None:
        return []
    formats = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in formats if part not in FORMATS]
    if wrong or not formats:
        raise UserError(f"--plots: {text!r} is not known; use png, svg or png,svg")
    return formats


def write(path: Path, text: str) -> Path:
    # Replaced atomically, so that a browser that reloads during a sweep never sees half a page.
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)
    return path
