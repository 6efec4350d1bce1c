"""Commands as an ordinary user who cannot become root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from project import BIN, ENV, PREDICT, REQUIRED, ROOT, RUNS, copy_project, run

pytestmark = pytest.mark.timeout(300)
NOBODY = 65534
Command = Callable[..., subprocess.CompletedProcess[str]]


def as_user() -> list[str]:
    """The words that drop root. A Python that is closed to others, as below /root, stays readable."""
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    if subprocess.run([*drop, BIN / "bench", "--version"], capture_output=True).returncode:
        drop += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return drop


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # pytest's own folders are closed to other users.
    with tempfile.TemporaryDirectory() as tmp:
        folder = copy_project(Path(tmp) / "project")
        (folder / ".venv").symlink_to(ROOT / ".venv")
        variables = folder / "inventories" / ENV / "group_vars/all"
        variables.mkdir(parents=True)
        # Those of the plan quick.
        fabrics = {"1g": {"rate_gbps": 1}, "10g": {"rate_gbps": 10}}
        (variables / "cluster.yml").write_text(json.dumps({"cluster": {**REQUIRED, "fabrics": fabrics}}))
        shutil.copytree(RUNS / "network-1g", folder / "results" / ENV / "plan")
        # sudo asks for a password.
        (Path(tmp) / "bin").mkdir()
        (Path(tmp) / "bin/sudo").write_text("#!/bin/sh\nexit 1\n")
        (Path(tmp) / "bin/sudo").chmod(0o755)
        if os.geteuid() == 0:
            for path in (Path(tmp), *Path(tmp).rglob("*")):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        yield folder


@pytest.fixture(scope="module")
def user(folder: Path) -> Command:
    drop = as_user() if os.geteuid() == 0 else []
    path = f"{folder.parent / 'bin'}:{os.environ['PATH']}"
    home = {"HOME": str(folder.parent), "XDG_CACHE_HOME": str(folder.parent / ".cache"), "PYTHONPATH": str(folder)}

    def command(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return run(*drop, BIN / name, *words, cwd=folder, PATH=path, **home)

    return command


@pytest.mark.parametrize(
    "words",
    [
        ["bench", *PREDICT],
        ["bench", "predict", "--validate"],
        ["bench", "plan", "--help"],
        ["bench", "report", f"results/{ENV}/plan"],
        ["bench", "explain", f"results/{ENV}/plan"],
        ["bench", "export", f"results/{ENV}/plan", "--format", "csv"],
        ["bench", "sweep", "--env", ENV, "--plan", "quick", "--dry-run"],
        ["cluster", "--env", ENV, "config"],
        ["cluster", "--env", ENV, "artefacts"],
        ["cluster", "prices"],
        ["cluster", "--env", "aws", "config"],
        ["cluster", "--env", "aws", "cost"],
    ],
    ids=" ".join,
)
def test_works_without_root(user: Command, words: list[str]) -> None:
    done = user(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr


def files(folder: Path) -> set[Path]:
    """All but what says that a command runs, or makes Python start faster."""
    return {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".lock", ".pyc")}


@pytest.mark.parametrize(
    "words",
    [
        ["cluster", "--env", ENV, "deploy"],
        ["cluster", "--env", ENV, "scale", "--nodes", "3"],
        ["cluster", "--env", ENV, "plan"],
        ["cluster", "--env", ENV, "destroy"],
        ["cluster", "clean"],
        ["cluster", "--env", "gpulab", "training-image", "--device", "cpu"],
        ["bench", "sweep", "--env", ENV, "--plan", "quick"],
    ],
    ids=" ".join,
)
def test_says_in_one_line_what_needs_root_and_changes_nothing(user: Command, folder: Path, words: list[str]) -> None:
    before = files(folder)
    done = user(*words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "podman needs root on this machine; run the command as root, or allow sudo without a password" in done.stderr
    assert files(folder) - before == set()


def test_doctor_lists_root_as_the_problem(user: Command) -> None:
    done = user("cluster", "--env", ENV, "doctor")
    assert done.returncode == 1
    assert "FAIL root: neither root nor sudo without a password" in done.stdout
    assert not done.stderr


def test_aws_commands_fail_for_credentials_and_not_for_root(user: Command) -> None:
    done = user("cluster", "--env", "aws", "destroy")
    assert "no credentials" in done.stderr
