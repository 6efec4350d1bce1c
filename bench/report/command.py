"""Write report.html and report.md: how the cluster scales, why, and what to change."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from cluster.core.errors import InfraError, UserError

FORMATS = ("png", "svg")


def configure(parser: argparse.ArgumentParser) -> None:
    text = "a run folder, or latest (default); several runs are shown side by side"
    parser.add_argument("run", metavar="RUN", nargs="*", default=["latest"], help=text)
    parser.add_argument("--out", type=Path, metavar="DIR", help="output folder (default: the run folder)")
    parser.add_argument("--plots", metavar="FORMATS", help="also write each plot: png, svg or png,svg (into DIR/plots)")
    parser.add_argument("--json", action="store_true", help="print the verdict and the files written as JSON")


def run(args: argparse.Namespace) -> int:
    # The plotting libraries take almost a second to import. `bench --help` does not need them.
    from bench import charts
    from bench.report import page, plots
    from bench.results import runs

    formats = wanted_formats(args.plots)
    wanted = [args.run] if isinstance(args.run, str) else args.run
    if len(wanted) > 1:
        return side_by_side(wanted, args.out, formats, args.json)
    args.run = wanted[0]
    report = page.make(runs.load(args.run))
    runs.print_problems(report.run)
    out: Path = args.out or report.run.folder
    written: list[Path] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        written.append(write(out / "report.html", page.html(report)))
        written.append(write(out / "report.md", page.markdown_page(report)))
        if formats:
            for number, family in enumerate(report.table.families):
                drawn = plots.charts_for(report.table, family, report.constructed, report.limits)
                prefix = "" if number == 0 else f"{number + 1}-"
                written += charts.write_all(drawn, out / "plots", formats, prefix)
    except OSError as error:
        raise InfraError(f"{out}: cannot write the report: {error.strerror}; free space or use --out DIR") from error
    if args.json:
        print(json.dumps({"verdict": report.verdict.as_json(), "files": [str(path) for path in written]}, indent=2))
    else:
        print(report.verdict.sentence)
        for path in written:
            print(f"wrote {path}")
    return 0


def side_by_side(names: list[str], out: Path | None, formats: list[str], as_json: bool) -> int:
    from bench import charts
    from bench.report import side_by_side
    from bench.results import runs, store

    found = [runs.load(name) for name in names]
    for one in found:
        runs.print_problems(one)
    text, markdown = side_by_side.page(found), side_by_side.markdown(found)
    out = out or store.RESULTS / "side-by-side"
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = [write(out / "report.html", text), write(out / "report.md", markdown)]
        cells = side_by_side.cells(found)
        for model in sorted({cell.model for cell in cells}) if formats else []:
            written += charts.write_all(side_by_side.charts(cells, model), out / "plots", formats, f"{model}-")
    except OSError as error:
        raise InfraError(f"{out}: cannot write the report: {error.strerror}; free space or use --out DIR") from error
    if as_json:
        print(json.dumps({"runs": names, "files": [str(path) for path in written]}, indent=2))
    else:
        print(markdown)
        for path in written:
            print(f"wrote {path}")
    return 0


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
