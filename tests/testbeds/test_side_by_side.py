"""bench report A B: the environments of the reference experiment side by side."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.report import side_by_side
from bench.results import runs

FIXTURES = Path(__file__).parents[1] / "fixtures/runs"


def copy(tmp_path: Path, source: str, env: str, name: str, **changes: Any) -> Path:
    """A recorded run as if it came from another environment; changes go into every point."""
    folder = tmp_path / env / name
    shutil.copytree(FIXTURES / source, folder)
    provenance = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps({**provenance, "env": env, "constructed": False}))
    lines = []
    for line in (folder / "trials.jsonl").read_text().splitlines():
        trial = json.loads(line)
        trial["point"] |= changes
        lines.append(json.dumps(trial))
    (folder / "trials.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_four_environments_are_columns_of_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wall = copy(tmp_path, "network-1g", "virtualwall", "virtualwall")
    one = copy(tmp_path, "compute-ib", "gpulab", "gpulab-1xN", fabric="net")
    many = copy(tmp_path, "compute-ib", "gpulab", "gpulab-Nx1", fabric="net")
    out = tmp_path / "out"
    assert main(["report", str(wall), str(one), str(many), "--out", str(out)]) == 0
    text = (out / "report.md").read_text()
    head = next(line for line in text.splitlines() if line.startswith("| GPUs") and "gpulab" in line)
    for name in ("virtualwall 1G", "virtualwall 10G", "gpulab/gpulab-1xN net", "gpulab/gpulab-Nx1 net"):
        assert name in head.replace("\\", ""), name
    assert text in capsys.readouterr().out
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "<script" not in page


def test_efficiency_is_against_one_gpu_of_the_same_run(tmp_path: Path) -> None:
    run = runs.load(copy(tmp_path, "network-1g", "virtualwall", "virtualwall"))
    found = {(cell.curve, cell.batch, cell.gpus): cell for cell in side_by_side.cells([run])}
    curve = next(name for name, _, _ in found if " 10G" in name)
    one, ten = found[(curve, 64, 1)], found[(curve, 64, 10)]
    assert one.efficiency == 1
    assert ten.efficiency == pytest.approx(ten.images_s / (10 * one.images_s))


def test_emulated_curves_say_so(tmp_path: Path) -> None:
    run = runs.load(copy(tmp_path, "network-1g", "local", "quick"))
    assert all(re.search("emulated P100", cell.curve) for cell in side_by_side.cells([run]))


def test_a_run_named_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wall = copy(tmp_path, "network-1g", "virtualwall", "virtualwall")
    assert main(["report", str(wall), str(wall)]) == 2
    assert "name each run once" in capsys.readouterr().err
