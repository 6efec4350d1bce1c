"""Commands that measure or change an environment exclude each other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from project import BIN, ENV, Project, last_line


def start(project: Project, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(BIN / words[0]), *words[1:]],
        cwd=project.folder,
        env={**os.environ, **project.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], file: Path) -> None:
    """Until the process holds the lock."""
    while not file.exists() or f'"pid": {process.pid},' not in file.read_text():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


@pytest.fixture
def sweep(deployed: Project) -> Iterator[subprocess.Popen[str]]:
    """A sweep that waits for its nodes: ssh connects and answers nothing."""
    (deployed.tmp / "bin/ssh").write_text("#!/bin/sh\nexec sleep 300\n")
    (deployed.tmp / "bin/podman").write_text("#!/bin/sh\necho '[]'\n")
    (deployed.tmp / "bin/podman").chmod(0o755)
    plan = {"nodes": [2], "batches": [32], "fabrics": ["1g"], "engines": ["ddp"]}
    (deployed.folder / "two.yml").write_text(json.dumps(plan))
    (deployed.folder / "two.py").write_text("print(2)")
    # Of a run.
    deployed.set_storage("glusterfs")
    process = start(deployed, "bench", "sweep", "--env", ENV, "--plan", "two.yml")
    wait_for(process, deployed.tmp / "machine.lock")
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "sweep", "--env", ENV, "--plan", "two.yml"],
        ["bench", "comm", "--env", ENV],
        ["bench", "tune", "--env", ENV],
        ["bench", "selfcheck", "--env", ENV],
        ["bench", "elastic", "--env", ENV],
        ["bench", "converge", "--env", ENV],
        ["bench", "run", "--env", ENV, "--folder", ".", "--", "python", "two.py"],
        ["bench", "data", "bench", "--env", ENV, "/shared/datasets"],
        ["cluster", "--env", ENV, "deploy"],
        ["cluster", "--env", ENV, "scale", "--nodes", "3"],
        ["cluster", "--env", ENV, "plan"],
        ["cluster", "--env", ENV, "renew"],
    ],
    ids=lambda words: " ".join(words).replace(f" --env {ENV}", ""),
)
def test_command_is_refused_while_a_sweep_runs(
    deployed: Project, sweep: subprocess.Popen[str], words: list[str]
) -> None:
    done = deployed.run(*words)
    assert done.returncode == 2, last_line(done)
    assert f"ENV={ENV}: `bench sweep --env {ENV} --plan two.yml` (pid {sweep.pid}, since " in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [["sweep", "--plan", "two.yml"], ["run", "--", "python", "two.py"]], ids=" ".join)
def test_what_shares_the_cores_of_a_sweep_waits_and_says_so(
    deployed: Project, sweep: subprocess.Popen[str], words: list[str]
) -> None:
    """Two sweeps at once, of two local environments, recorded 217 images/s where one alone reached 376."""
    for folder in (".state", "inventories"):
        shutil.copytree(deployed.folder / folder / ENV, deployed.folder / folder / "other")
    second = start(deployed, "bench", words[0], "--env", "other", *words[1:])
    try:
        assert second.stdout
        assert (
            f"waiting for `bench sweep --env {ENV} --plan two.yml` (pid {sweep.pid}, since " in second.stdout.readline()
        )
        sweep.kill()
        sweep.wait()
        wait_for(second, deployed.tmp / "machine.lock")
    finally:
        second.kill()
        second.wait()


def test_unknown_environment_leaves_no_file(project: Project) -> None:
    for words in (["bench", "comm", "--env", "nosuch"], ["bench", "tune", "--env", "nosuch"]):
        done = project.run(*words)
        assert done.returncode in (2, 3), last_line(done)
    assert not (project.folder / ".state").exists()
