"""The examples of docs/predict.md and of the help text run as pasted, and a prediction starts without heavy imports."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli import main
from bench.predict import command

ROOT = Path(__file__).parents[2]
# They need a run, or take a minute and have tests of their own.
ELSEWHERE = ("--calibrate", "--by-source")


def examples() -> list[str]:
    texts = ((ROOT / "docs/predict.md").read_text(), command.__doc__ or "")
    joined = "\n".join(texts).replace("\\\n", " ")
    lines = re.findall(r"^ +(bench (?:predict|plan) .*)$", joined, re.M)
    # What follows several spaces on a line says what the example is for.
    found = [re.split(r"\s{4,}(?!-)", line)[0] for line in lines]
    return [line for line in dict.fromkeys(found) if not any(word in line for word in ELSEWHERE)]


def test_examples_are_found() -> None:
    assert len(examples()) >= 12


@pytest.mark.parametrize("line", examples())
def test_an_example_runs_as_pasted(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_a_prediction_imports_nothing_heavy() -> None:
    program = (
        "import sys; from bench.cli import main; "
        "main(['predict', '--gpu', 'v100', '--gpus', '8', '--gpus-per-node', '4', '--rate-gbps', '10', '--json']); "
        "print([name for name in ('torch', 'scipy', 'numpy', 'pydantic', 'altair') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
