"""Every example of the documents and of the help texts runs as pasted, and a prediction starts without heavy imports.

Examples that need a cluster are in tests/e2e.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli import COMMANDS, main
from bench.results import runs, store

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests/fixtures"
WITHOUT_CLUSTER = "predict|plan|report|explain|compare|export|timeline"
# --by-source takes a minute and has tests of its own; torch is on the nodes: roles/horovod/molecule; three runs side by
# side are also in the example of several environments.
ELSEWHERE = ("--by-source", "--torch", "--help", "--example", "RUN RUN RUN")
# What a page calls a run, a trial and a file, and two runs to compare.
PLACES = {"RUN": "results/local/one", "ID": "", "A": "results/local/one", "B": "results/local/latest", "FILE": "t.json"}
NAMED_RUNS = ("local/one", "virtualwall/virtualwall", "gpulab/gpulab-1xN", "gpulab/gpulab-Nx1", "k8s/scaling")


def help_texts() -> list[str]:
    """The docstring of a command is its help."""
    files = [ROOT / f"{module.replace('.', '/')}.py" for module in COMMANDS.values()]
    return [path.read_text() for path in files]


def examples() -> list[str]:
    pages = [path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]]
    joined = "\n".join([*pages, *help_texts()]).replace("\\\n", " ")
    lines = re.findall(rf"^ +(bench (?:{WITHOUT_CLUSTER}) .*)$", joined, re.M)
    # What follows several spaces on a line says what the example is for.
    found = [re.split(r"\s{4,}(?!-)", line)[0] for line in lines]
    return [line for line in dict.fromkeys(found) if not any(word in line for word in ELSEWHERE)]


def test_examples_are_found() -> None:
    assert len(examples()) >= 25


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user who has measured before."""
    for name in NAMED_RUNS:
        shutil.copytree(FIXTURES / "runs/network-1g", tmp_path / "results" / name)
    shutil.copy(FIXTURES / "runs/horovod-timeline.json", tmp_path / "t.json")
    (tmp_path / "my-model.csv").write_text(
        "layer,shapes,macs,activations\nimages,3x224x224,,\nconv,64x3x7x7,118013952,802816\n"
    )
    monkeypatch.setattr(store, "RESULTS", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", examples())
def test_an_example_runs_as_pasted(line: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = runs.load("results/local/one").trials[0].id
    places = PLACES | {"ID": trial, "RUN/ID": f"results/local/one/{trial}"}
    words = [places.get(word, word) for word in shlex.split(line)[1:]]
    # 1: a comparison found a regression, a plan reached no target.
    assert main(words) in ((0, 1) if words[0] == "compare" else (0,)), capsys.readouterr().err
    assert capsys.readouterr().out


def test_a_prediction_imports_nothing_heavy() -> None:
    program = (
        "import sys; from bench.cli import main; "
        "main(['predict', '--gpu', 'v100', '--gpus', '8', '--gpus-per-node', '4', '--rate-gbps', '10', '--json']); "
        "print([name for name in ('torch', 'scipy', 'numpy', 'networkx', 'pydantic', 'altair') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
