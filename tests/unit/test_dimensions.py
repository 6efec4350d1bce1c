"""Curves and rows are told apart by whatever varies: in report, notebook, terminal, compare and exports alike."""

from __future__ import annotations

import io
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from report_cases import RUNS, copy, judged
from rich.console import Console

import bench
from bench.cli import main
from bench.plan import schema
from bench.report import plots, side_by_side
from bench.results import dimensions, runs, store
from bench.results.trial import Point
from bench.sweep import progress, summary

BASE: dict[str, Any] = {
    **{"fabric": "1g", "rate_gbps": 1.0, "nodes": 2, "gpus_per_node": 1, "batch": 64, "model": "resnet50"},
    **{"engine": "horovod-mpi", "compression": "none", "device": "emulated:p100", "data": "shards:/a", "repeat": 0},
}
OTHER: dict[str, Any] = {
    **{"fabric": "10g", "rate_gbps": 25.0, "nodes": 4, "gpus_per_node": 2, "batch": 32, "model": "vgg16"},
    **{"engine": "ddp", "compression": "fp16", "device": "emulated:v100", "data": "shards:/b", "repeat": 1},
    "transport": "verbs",
}


@pytest.mark.parametrize("name", OTHER)
def test_points_that_differ_in_one_condition_have_different_labels(name: str) -> None:
    points = [Point(**BASE), Point(**{**BASE, name: OTHER[name]})]
    varying = dimensions.varying(points)
    assert len(varying) == 1
    assert len({dimensions.label(point, varying) for point in points}) == 2


def test_every_condition_of_a_point_is_a_dimension() -> None:
    assert set(Point.model_fields) - {"transport", "rate_gbps"} == set(dimensions.DIMENSIONS) - {"rate"}


def test_rate_is_no_dimension_where_each_fabric_has_one() -> None:
    points = [Point(**BASE), Point(**{**BASE, "fabric": "10g", "rate_gbps": 10.0})]
    assert dimensions.varying(points) == ["fabric"]


def vary(tmp_path: Path, name: str) -> Path:
    """A run in which each point of the straggler case is there twice, and differs only in one condition."""
    folder = copy("straggler", tmp_path)
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    twice = []
    for number, value in enumerate((BASE.get(name, "tcp"), OTHER[name])):
        for line in lines:
            point = {**line["point"], name: value}
            twice.append({**line, "id": f"{number}{line['id'][1:]}", "point": point})
    (folder / "trials.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in twice))
    return folder


# A device is a kind of its own here, and node counts and repeats lie along a curve.
CONDITIONS = [name for name in OTHER if name not in ("device", "nodes", "repeat")]


@pytest.mark.parametrize("name", CONDITIONS)
def test_no_plot_joins_points_of_different_conditions(tmp_path: Path, name: str) -> None:
    run = bench.load(vary(tmp_path, name))
    for family in run.families:
        for chart in run.charts(family).values():
            (rows,) = chart.to_dict()["datasets"].values()
            curves = [(row["fabric"], row["variant"], row["group"], row["nodes"]) for row in rows]
            assert len(curves) == len(set(curves)) > 0
    frame = run.frame()
    assert len(set(zip(frame.curve, frame.nodes, strict=True))) == len(frame) == 8


@pytest.mark.parametrize("name", CONDITIONS)
def test_no_two_rows_look_the_same(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = vary(tmp_path, name)
    if name != "transport":  # which compare ignores: runs of schema 1 have none
        assert main(["compare", str(folder), str(folder), "--json"]) == 0
        rows = [row["point"] for row in json.loads(capsys.readouterr().out)["points"]]
        assert len(rows) == len(set(rows)) == 8
    out = io.StringIO()
    monkeypatch.setattr(summary, "console", Console(file=out, width=300))
    trials = runs.load(folder).trials
    summary.show(trials, schema.load("quick"), {}, store.RunFolder(folder))
    cells = [line.split("│")[1:] for line in out.getvalue().splitlines() if line.startswith("│")]
    assert len(cells) == 8
    assert all(a != b for a, b in combinations([[cell.strip() for cell in row] for row in cells], 2))


@pytest.mark.parametrize("name", [name for name in CONDITIONS if name not in ("model", "batch")])
def test_side_by_side_takes_a_run_in_which_anything_varies(tmp_path: Path, name: str) -> None:
    cells = side_by_side.cells([runs.load(vary(tmp_path, name))])
    assert len({cell.curve for cell in cells}) == 2


@pytest.mark.parametrize("name", CONDITIONS)
def test_tensorboard_has_one_curve_per_condition(tmp_path: Path, name: str) -> None:
    folder, out = vary(tmp_path, name), tmp_path / "board"
    assert main(["export", str(folder), "--format", "tensorboard", "--out", str(out)]) == 0
    assert len(list(out.iterdir())) == 2


def test_progress_tells_repeats_and_data_sources_apart() -> None:
    points = [Point(**{**BASE, **change}) for change in ({}, {"repeat": 1}, {"data": "shards:/b"})]
    assert len({progress.label(point) for point in points}) == 3


def test_point_that_only_the_second_run_has_names_its_model(tmp_path: Path, capsys) -> None:
    one = copy("two-models", tmp_path, lambda trial: trial["point"]["model"] == "resnet50")
    assert main(["compare", str(one), str(RUNS / "two-models"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "1G, two nodes, batch 64, VGG-16" in report["only_in_b"]
    assert "1G, two nodes, batch 64, ResNet-50" in [row["point"] for row in report["points"]]


def test_sentence_names_the_model_where_there_are_several(tmp_path: Path) -> None:
    assert judged(RUNS / "two-models").sentence.startswith("With ResNet-50 on 1G, two emulated P100 nodes train at")
    one = copy("two-models", tmp_path, lambda trial: trial["point"]["model"] == "vgg16")
    assert judged(one).sentence.startswith("On 1G two emulated P100 nodes train at")


def test_markdown_has_a_verdict_per_family_and_failed_trials_name_their_model(tmp_path: Path) -> None:
    def fail(trial: dict) -> None:
        if trial["point"]["nodes"] == 2 and trial["point"]["fabric"] == "10g":
            trial.update(status="failed", error="it broke")

    folder = copy("two-models", tmp_path, fail)
    assert main(["report", str(folder)]) == 0
    text = (folder / "report.md").read_text()
    assert "With VGG-16 on 1G, two emulated P100 nodes train at 9% efficiency" in text
    failed = [line for line in text.splitlines() if "it broke" in line]
    assert ["VGG-16" in line for line in failed].count(True) == 1 and len(failed) == 2
    assert failed[0].count("|") == failed[1].count("|") == text[text.index("| trial |") :].splitlines()[0].count("|")


def chart(name: str, folder: Path) -> dict[str, Any]:
    table = runs.load(folder).table()
    drawn: dict[str, Any] = plots.charts_for(table, table.families[0])[name].to_dict()
    return drawn


def test_title_promises_only_lines_that_are_there(tmp_path: Path) -> None:
    assert chart("bus", RUNS / "one-count")["title"]["text"].endswith("(dashed: link rate, dotted: link as measured)")
    bare = copy("one-count", tmp_path, lambda trial: trial.update(link_gbps=None, breakdown_ms=None))
    assert chart("bus", bare)["title"]["text"] == "All-reduce bus bandwidth (dashed: link rate)"
    assert chart("throughput", bare)["title"]["text"] == "Throughput"


@pytest.mark.parametrize(("name", "counts"), [("two-models", [1, 2]), ("one-count", [2]), ("engines", [1, 2, 4, 8])])
def test_node_axis_has_a_tick_at_each_node_count(name: str, counts: list[int]) -> None:
    layers = chart("throughput", RUNS / name)["spec"]["layer"]
    axes = [layer["encoding"]["x"]["axis"] for layer in layers if "axis" in layer["encoding"].get("x", {})]
    assert axes and all(axis["values"] == counts for axis in axes)
