"""bench.load() as docs/python-api.md describes it."""

from __future__ import annotations

import ast
import doctest
import json
import shutil
import sys
from pathlib import Path

import pytest
from report_cases import RUNS

import bench
from bench.api import Run
from bench.results import store
from cluster.core.errors import UserError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/python-api.md"
NOTEBOOKS = sorted(ROOT.glob("notebooks/**/*.ipynb"))


def test_examples_of_the_page_hold(tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(RUNS / "engines", tmp_path / "results/local/quick")
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 10
    assert not failed
    assert "<svg" in (tmp_path / "throughput.svg").read_text()


def test_page_names_every_member_and_column() -> None:
    text = PAGE.read_text()
    members = {name for name in (*vars(Run), *Run.__dataclass_fields__) if not name.startswith("_")}
    assert {name for name in members if f"`{name}" not in text} == set()
    columns = {name for name in bench.load(RUNS / "engines").frame() if not name.endswith(("_low", "_high"))}
    assert {name for name in columns if f"`{name}`" not in text} == set()


def test_latest_is_the_newest_run_in_results(tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(RUNS / "engines", tmp_path / "local/quick")
    monkeypatch.setattr(store, "RESULTS", tmp_path)
    assert bench.load().folder == tmp_path / "local/quick"


def test_missing_pandas_is_one_line(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"run\.frame\(\): pandas is not installed; .*pip install pandas"):
        bench.load(RUNS / "engines").frame()


def test_run_without_a_measured_point_has_no_rows_and_no_charts(tmp_path: Path) -> None:
    (tmp_path / "trials.jsonl").write_text("")
    run = bench.load(tmp_path)
    assert (run.points, run.families, run.charts(), run.caveat(), len(run.frame())) == ([], [], {}, "", 0)
    assert any("no readable trial" in text for text in run.problems)
    assert run.problems[-1] in run._repr_markdown_()


def cells(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_uses_nothing_of_ours_but_the_api(path: Path) -> None:
    nodes = [node for source in cells(path) for node in ast.walk(ast.parse(source))]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    allowed = {"bench"} if path.name == "scaling.ipynb" else set()
    assert {name for name in imported if name.split(".")[0] in ("bench", "cluster")} == allowed
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "bench"}
    assert used <= {"load"}
    members = {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "run"
    }
    assert {name for name in members if f"`{name}" not in PAGE.read_text()} == set()
