"""bench run as a command: what it refuses, and where the value of a variable goes. The nodes are a stand-in for ssh."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from pathlib import Path

import pytest
from project import BIN, ENV, Project, last_line

SECRET = secrets.token_hex(8)
# A run is followed until the stand-in's output ends; this one stays.
FOLLOWS = """#!/bin/sh
case "$*" in *run_follow*) exec sleep 60;; esac
exec {ssh} "$@"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mine"
    made.mkdir()
    (made / "train.py").write_text("print(1)\n")
    return made


REFUSED = (
    ("glusterfs", ("--", "python", "missing.py"), "missing.py: no such file"),
    ("glusterfs", ("--nodes", "3", "--", "python", "train.py"), "--nodes 3: the cluster has 2"),
    ("none", ("--", "python", "train.py"), "cluster.storage.backend: none"),
    ("glusterfs", ("--then", "destroy", "--detach", "--", "python", "train.py"), "--then destroy"),
    ("glusterfs", ("--then", "stop", "--", "python", "train.py"), "--then stop"),
    ("glusterfs", ("--requirements", "none.txt", "--", "python", "train.py"), "--requirements none.txt"),
    ("glusterfs", (), "COMMAND"),
)


def test_what_cannot_work_exits_2_in_one_line_and_reaches_no_node(deployed: Project, folder: Path) -> None:
    for backend, words, field in REFUSED:
        deployed.set_storage(backend)
        done = deployed.run("bench", "run", "--env", ENV, "--folder", folder, *words)
        assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (2, 1, ""), last_line(done)
        assert done.stderr.startswith(f"bench: {field}")
    assert not deployed.calls() and not (deployed.folder / "results").exists()


def test_make_run_passes_its_words_on(deployed: Project, folder: Path) -> None:
    deployed.set_storage("glusterfs")
    made = ("make", "-n", "run", f"SCRIPT={folder}/train.py", "ARGS=--epochs 3 --name 'a b'", "NODES=2", f"ENV={ENV}")
    recipe = subprocess.run(made, cwd=deployed.folder, capture_output=True, text=True, check=True).stdout
    command = recipe.splitlines()[-1].replace("bench run ", "bench run --print ")
    done = subprocess.run(
        ["sh", "-c", command],
        **{"cwd": deployed.folder, "env": {**os.environ, **deployed.environment}, "capture_output": True, "text": True},
    )
    assert done.returncode == 0 and done.stdout.endswith(" python train.py --epochs 3 --name 'a b'\n"), done.stderr


def test_connection_that_breaks_ends_the_run_and_is_named(deployed: Project, folder: Path) -> None:
    """The head still answers, so the run is stopped there; the stand-in has no records to fetch."""
    deployed.set_storage("glusterfs")
    ssh = deployed.tmp / "bin/ssh"
    ssh.rename(deployed.tmp / "bin/real-ssh")
    ssh.write_text(FOLLOWS.format(ssh=deployed.tmp / "bin/real-ssh").replace("sleep 60", "sh -c 'exit 255'"))
    ssh.chmod(0o755)
    done = deployed.run("bench", "run", "--env", ENV, "--folder", folder, "--", "python", "train.py")
    assert done.returncode == 3
    assert "the connection to head broke, which ends the run" in done.stderr, done.stderr
    stopped = [" ".join(call["argv"]) for call in deployed.calls() if "systemctl stop run-" in " ".join(call["argv"])]
    assert any("-launch" in text for text in stopped)


def test_value_of_a_variable_is_in_no_command_line_file_or_output(deployed: Project, folder: Path) -> None:
    """It reaches the nodes over the standard input of ssh, and nothing else has it."""
    deployed.set_storage("glusterfs")
    ssh = deployed.tmp / "bin/ssh"
    ssh.rename(deployed.tmp / "bin/real-ssh")
    ssh.write_text(FOLLOWS.format(ssh=deployed.tmp / "bin/real-ssh"))
    ssh.chmod(0o755)
    words = ("run", "--env", ENV, "--env", f"TOKEN={SECRET}", "--folder", str(folder), "--", "python", "train.py")
    process = subprocess.Popen(
        [str(BIN / "bench"), *words],
        **{"cwd": deployed.folder, "env": {**os.environ, **deployed.environment}},
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
    )
    try:
        deadline = time.monotonic() + 60
        while not any("run_launch" in " ".join(call["argv"]) for call in deployed.calls()):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.2)
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
        assert f"TOKEN={'*' * len(SECRET)}" in shown
        assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if has(path, SECRET)]
        assert not [path for path in deployed.folder.rglob("*") if path.is_file() and has(path, SECRET)]
        calls = deployed.calls()
        assert not any(SECRET in word for call in calls for word in call["argv"])
        # Once per node, for the file in memory.
        given = [call for call in calls if SECRET in call["stdin"]]
        assert len(given) == 2 and all("umask 077" in " ".join(call["argv"]) for call in given)
    finally:
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    assert SECRET not in output


def has(path: Path, text: str) -> bool:
    try:
        return text.encode() in path.read_bytes()
    except OSError:
        return False
