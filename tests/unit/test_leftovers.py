"""Ending what an interrupted command left behind, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.core import process

COMMAND = """
import os, subprocess, sys
from pathlib import Path
from cluster.core import process
os.environ.update(process.marks(Path(sys.argv[1])))
if sys.argv[2] == "exec":
    print(os.getpid(), flush=True)
    os.execvp("sleep", ["sleep", "300"])
tool = [sys.executable, "-c", sys.argv[3], sys.argv[1]] if sys.argv[3:] else ["sleep", "300"]
child = subprocess.Popen(tool, start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


@contextmanager
def command(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command on a state folder, and the process that it started or became."""
    argv = [sys.executable, "-c", COMMAND, str(folder), *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        tool = int(owner.stdout.readline())
        # A process that was just started has no variables yet: Popen returns a moment before they are in place.
        while not Path(f"/proc/{tool}/environ").read_bytes():
            time.sleep(0.01)
        try:
            yield owner, tool
        finally:
            owner.kill()
            for pid in process.leftovers(folder) | {tool}:
                if process.identity(pid):
                    os.kill(pid, signal.SIGKILL)


def kill(owner: subprocess.Popen[str]) -> None:
    owner.kill()
    owner.wait()


def test_tool_of_a_killed_command_is_ended(tmp_path: Path) -> None:
    with command(tmp_path, "start") as (owner, tool):
        kill(owner)
        assert process.identity(tool)
        assert process.end_leftovers(tmp_path) == 1
        assert not process.identity(tool)


@pytest.mark.parametrize("kind", ["exec", "start"])
def test_open_shell_and_running_sweep_stay(tmp_path: Path, kind: str) -> None:
    """`make shell` becomes ssh; a sweep starts ssh."""
    with command(tmp_path, kind) as (_, tool):
        assert process.end_leftovers(tmp_path) == 0
        assert process.identity(tool)


def test_tools_that_a_tool_started_are_ended_too(tmp_path: Path) -> None:
    """Terraform starts a Python tool, which gives its own tools its own mark."""
    with command(tmp_path, "start", COMMAND.replace("sys.argv[2]", '"start"')) as (owner, tool):
        assert owner.stdout
        inner = int(owner.stdout.readline())
        kill(owner)
        assert process.end_leftovers(tmp_path) == 2
        assert not process.identity(tool)
        assert not process.identity(inner)


def test_other_environment_is_left_alone(tmp_path: Path) -> None:
    with command(tmp_path / "a", "start") as (owner, tool):
        kill(owner)
        assert process.end_leftovers(tmp_path / "b") == 0
        assert process.identity(tool)


def test_own_children_are_ended(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "300"], env={**os.environ, **process.marks(tmp_path)}) as child:
        assert process.end_leftovers(tmp_path) == 1
        assert child.wait() == -signal.SIGTERM
