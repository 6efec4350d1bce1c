"""The layers of pyproject.toml: an import that points upwards is an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("cluster/core/errors.py", "from cluster import lifecycle"),
        ("cluster/terraform.py", "from bench.results import trial"),
        ("bench/results/store.py", "from bench.report import page"),
        ("bench/worker/protocol.py", "from cluster.core import errors"),
    ],
)
def test_import_that_points_upwards_is_refused(tmp_path: Path, file: str, line: str) -> None:
    for package in ("bench", "cluster"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    linter = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    path = tmp_path / file
    path.write_text(f"{path.read_text()}\n{line}\n")
    done = subprocess.run(linter, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "is not allowed to import" in done.stdout
