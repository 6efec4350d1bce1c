"""Lines of JSON that a script writes become TensorBoard's numbers. The server itself: roles/jupyterlab/molecule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cluster.core.config import ROOT

sys.path.insert(0, str(ROOT / "roles/jupyterlab/files"))
import tensorboard_server as server


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"step": 10, "loss": 0.5, "note": "x", "flag": [1]}', (10, {"loss": 0.5})),
        (b'{"loss": 1}', (7, {"loss": 1.0})),
        (b'{"step": 1, "loss": NaN, "rate": Infinity, "big": 1e400, "huge": ' + b"9" * 400 + b"}", (1, {})),
        (b'{"step": NaN, "loss": 1}', (7, {"loss": 1.0})),
        (b"[1, 2]", (7, {})),
        (b"\xff half a li", (7, {})),
    ],
)
def test_a_line_gives_its_step_and_its_finite_numbers(line: bytes, expected: tuple[int, dict[str, float]]) -> None:
    assert server.values(line, 7) == expected


def test_lines_are_read_once_when_they_are_complete_and_again_in_a_new_file(tmp_path: Path) -> None:
    source = tmp_path / "metrics.jsonl"
    metrics = server.Metrics(source, tmp_path / "shown")
    source.write_bytes(b"one\ntw")
    assert list(metrics.new_lines()) == [b"one\n"]
    with source.open("ab") as file:
        file.write(b"o\nthree\n")
    assert list(metrics.new_lines()) == [b"two\n", b"three\n"]
    assert list(metrics.new_lines()) == []
    source.write_bytes(b"new\n")
    assert (list(metrics.new_lines()), metrics.times, metrics.number) == ([b"new\n"], 1, 1)


def test_outputs_of_runs_and_sweeps_are_shown_and_copied_code_is_not(tmp_path: Path) -> None:
    share, shown = tmp_path / "share", tmp_path / "shown"
    for name in ("runs/a/out", "runs/a/code", "runs/g/lr=0.1/out", "runs/g/out", "results/sweeps/quick"):
        (share / name).mkdir(parents=True)
    for _ in range(2):
        server.update(share, shown, {})
    links = {str(path.relative_to(shown)): path.resolve() for path in shown.rglob("*") if path.is_symlink()}
    assert links == {
        "runs/a/out": share / "runs/a/out",
        "runs/g/lr=0.1/out": share / "runs/g/lr=0.1/out",
        "runs/g/out": share / "runs/g/out",
        "sweeps": share / "results/sweeps",
    }
