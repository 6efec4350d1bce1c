"""notebooks/scaling.ipynb as Jupyter executes it, and what notebooks/cluster/plot.ipynb draws."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import nbformat
import pytest
from nbclient import NotebookClient
from report_cases import RUNS, copy

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NOTEBOOK = NOTEBOOKS / "scaling.ipynb"
PLOT = NOTEBOOKS / "cluster/plot.ipynb"


@pytest.mark.parametrize("name", ["engines", "one-node", "two-models"])
def test_notebook_redraws_the_plots(name: str, monkeypatch) -> None:
    monkeypatch.setenv("BENCH_RUN", str(RUNS / name))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [text for output in outputs if (text := output.get("data", {}).get("image/svg+xml"))]
    assert len(pictures) == {"engines": 6, "one-node": 4, "two-models": 5}[name]
    # The last plot has every curve: models are not joined into one line.
    assert all(model in pictures[-1] for model in ("ResNet-50, 1G", "VGG-16, 1G")) == (name == "two-models")
    assert all("EMULATED P100" in picture and "<path" in picture for picture in pictures)
    assert any("emulated P100" in output.get("data", {}).get("text/markdown", "") for output in outputs)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("**/*.ipynb")), ids=lambda path: path.name)
def test_notebook_is_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")


def draw(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, float]]:
    """The curves of plot.ipynb's left plot by label. The controller has no matplotlib, so a mock records the calls."""
    pyplot, speed, share = MagicMock(), MagicMock(), MagicMock()
    pyplot.subplots.return_value = (MagicMock(), (speed, share))
    monkeypatch.setitem(sys.modules, "matplotlib", MagicMock(pyplot=pyplot))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    for cell in nbformat.read(PLOT, as_version=4).cells:
        if cell.cell_type == "code":
            exec(cell.source, names)  # noqa: S102 - our own notebook
    assert pyplot.show.called
    curves = {call.kwargs["label"]: dict(zip(*call.args, strict=True)) for call in speed.plot.call_args_list}
    assert len(curves) == speed.plot.call_count == share.plot.call_count
    return curves


def test_cluster_plot_draws_every_point_of_two_models(tmp_path: Path, monkeypatch) -> None:
    run = copy("network-1g", tmp_path / "results/local")
    lines = (run / "trials.jsonl").read_text().splitlines()
    trials = [json.loads(line) for line in lines]
    for trial in trials:
        other = {**trial["point"], "model": "vgg16"}
        halved = {name: value / 2 for name, value in trial["images_per_second"].items()}
        lines.append(json.dumps({**trial, "id": f"{trial['id'][:-1]}v", "point": other, "images_per_second": halved}))
    (run / "trials.jsonl").write_text("\n".join(lines) + '\n{"id": "cut o')
    curves = draw(tmp_path, monkeypatch)
    assert sum(len(curve) for curve in curves.values()) == 2 * len(trials)
    for trial in trials:
        point, rate = trial["point"], trial["images_per_second"]["median"]
        for model, expected in (("resnet50", rate), ("vgg16", rate / 2)):
            label = f"batch {point['batch']}, fabric {point['fabric']}, model {model}, rate_gbps {point['rate_gbps']}"
            assert curves[label][point["nodes"]] == expected


def test_cluster_plot_merges_repeats_and_takes_the_last_record_of_a_trial(tmp_path: Path, monkeypatch) -> None:
    run = copy("one-node", tmp_path / "results/local")
    trial = json.loads((run / "trials.jsonl").read_text().splitlines()[0])
    records = [("a", 0, 1.0), ("a", 0, 100.0), ("b", 1, 300.0)]
    lines = [
        json.dumps({**trial, "id": id, "point": {**trial["point"], "repeat": n}, "images_per_second": {"median": rate}})
        for id, n, rate in records
    ]
    (run / "trials.jsonl").write_text("\n".join(lines))
    assert draw(tmp_path, monkeypatch) == {"all points": {1: 200.0}}
