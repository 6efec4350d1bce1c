"""What a sweep copies to the share: its trials for the notebooks, its curves for TensorBoard."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_run import nodes

from bench.results.store import RunFolder
from bench.sweep import publish
from cluster import transfer
from cluster.core.config import ROOT
from cluster.core.errors import InfraError


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    shutil.copytree(ROOT / "bench/report/example/quick", tmp_path / "quick")
    return RunFolder(tmp_path / "quick")


def test_trials_and_a_curve_per_condition_go_to_a_folder_of_the_runs_name(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: dict[str, list[str]] = {}

    def copy(_: object, source: str, target: str) -> None:
        folder = Path(source)
        assert source.endswith("/"), "rsync would add a folder"
        copied[target] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        assert (folder / "trials.jsonl").read_bytes() == run.trials_file.read_bytes()

    monkeypatch.setattr(transfer, "copy", copy)
    publish.to_share(nodes(2), run)
    ((target, files),) = copied.items()
    assert target.endswith(":/shared/results/sweeps/quick")
    # Two fabrics and three batches.
    assert len([name for name in files if "tfevents" in name]) == 6


def test_share_that_takes_no_files_is_a_warning(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def copy(*_: object) -> None:
        raise InfraError("rsync: no space left")

    monkeypatch.setattr(transfer, "copy", copy)
    publish.to_share(nodes(2), run)
    assert "not copied to the share: rsync: no space left" in capsys.readouterr().out.replace("\n", " ")
