"""Write report.html and report.md: how the cluster scales, why, and what to change."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.parse import named_path
from cluster.core.errors import InfraError, UserError

if TYPE_CHECKING:
    from bench.results.runs import Run

FORMATS = ("png", "svg")
EXAMPLE = Path(__file__).parent / "example/quick"


def configure(parser: argparse.ArgumentParser) -> None:
    text = "a run folder, or latest (default); several runs are shown side by side"
    parser.add_argument("run", metavar="RUN", nargs="*", default=["latest"], help=text)
    text = "write and open the report of a small run that comes with the package (into results/example)"
    parser.add_argument("--example", action="store_true", help=text)
    parser.add_argument("--out", type=named_path, metavar="DIR", help="output folder (default: the run folder)")
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
    from bench.results import runs, store

    formats = wanted_formats(args.plots)
    if args.example and args.run != ["latest"]:
        raise UserError(f"--example: it is a run of its own; leave out {' '.join(args.run)} or --example")
    names = [str(EXAMPLE)] if args.example else args.run
    found = [runs.load(name) for name in names]
    for one in found:
        runs.print_problems(one)
    output = one_run(found[0]) if len(found) == 1 else side_by_side(found, names)
    out: Path = args.out or (store.RESULTS / "example" if args.example else output.folder)
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
        if args.example:
            show(written[0])
    return 0


def show(page: Path) -> None:
    """Open a page in the browser, or print how to look at it from another machine."""
    # Without a display, webbrowser would start a text browser, which runs no scripts and so draws no plots.
    display = sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
    if display and webbrowser.open(page.resolve().as_uri()):
        print(f"opened {page} in the browser")
        return
    serve = ["python3", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(page.resolve().parent), "8000"]
    print(
        f"No browser can be opened here. Copy {page.name} to a machine that has one, or serve it:",
        f"    {shlex.join(serve)}",
        "and open http://127.0.0.1:8000/report.html there, after ssh -L 8000:127.0.0.1:8000 to this machine.",
        sep="\n",
    )


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
