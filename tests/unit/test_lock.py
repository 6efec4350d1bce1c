"""Locks between processes: exclusive, re-entrant, released by death, and never a file that somebody else replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.core import lock
from cluster.core.errors import UserError

CODE = """
import sys, time
from pathlib import Path
from cluster.core import lock
path = Path(sys.argv[2])
lock.MACHINE = path
kinds = {
    "environment": lambda: lock.environment(path, "x"),
    "measuring": lambda: lock.measuring("local", lambda text: text and print(text, flush=True)),
    "disturbing": lambda: lock.disturbing("local", lambda text: text and print(text, flush=True)),
}
with kinds[sys.argv[1]]():
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other(kind: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that wants a lock and keeps it until its standard input closes."""
    argv = [sys.executable, "-c", CODE, kind, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lock, "MACHINE", tmp_path / "x.lock")
    return tmp_path / "x.lock"


def take(path: Path) -> None:
    with lock.environment(path, "x"):
        pass


def test_second_command_is_refused_with_the_holder_and_its_start(path: Path) -> None:
    with other("environment", path) as process:
        assert line(process) == "held"
        with pytest.raises(UserError, match=rf"^ENV=x: `-c environment .* \(pid {process.pid}, since \d\d:") as found:
            take(path)
        assert "\n" not in str(found.value)
        assert (who := lock.holder(path))
        assert who.pid == process.pid


def test_one_process_may_take_a_lock_again(path: Path) -> None:
    with lock.environment(path, "x"):
        take(path)
        with other("environment", path) as process:
            assert line(process) == "", "the inner release freed the outer lock"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_lock_ends_with_its_owner(path: Path, number: signal.Signals) -> None:
    with other("environment", path) as process:
        assert line(process) == "held"
        process.send_signal(number)
        process.wait()
        assert lock.holder(path) is None
        take(path)


def test_file_of_a_lock_stays(path: Path) -> None:
    take(path)
    before = path.stat().st_ino
    take(path)
    assert path.stat().st_ino == before
    assert path.read_text() == ""


def test_looking_at_a_lock_does_not_refuse_a_command(path: Path) -> None:
    take(path)
    code = f"from pathlib import Path; from cluster.core import lock\nwhile True: lock.holder(Path({str(path)!r}))"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            for _ in range(200):
                take(path)
        finally:
            process.kill()


def test_measurement_waits_for_another_and_names_it(path: Path) -> None:
    with other("measuring", path) as first:
        assert line(first) == "held"
        with other("measuring", path) as second:
            assert f"(pid {first.pid}, since " in line(second)
            first.kill()
            assert line(second) == "held"


def test_deploys_run_side_by_side_but_not_under_a_measurement(path: Path) -> None:
    with other("disturbing", path) as first, other("disturbing", path) as second:
        assert line(first) == line(second) == "held"
        with other("measuring", path) as third:
            waits = line(third)
            assert f"pid {first.pid}," in waits
            assert f"pid {second.pid}," in waits
            first.kill()
            second.kill()
            assert line(third) == "held"
            with other("disturbing", path) as fourth:
                assert f"pid {third.pid}," in line(fourth)


def test_remote_nodes_need_no_lock_of_this_machine(path: Path) -> None:
    with other("measuring", path) as process:
        assert line(process) == "held"
        with lock.measuring("aws", pytest.fail), lock.disturbing("aws", pytest.fail):
            pass


def test_link_in_place_of_the_file_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("content")
    path.symlink_to(tmp_path / "victim")
    with pytest.raises(lock.InfraError, match="cannot be locked"):
        take(path)
    assert (tmp_path / "victim").read_text() == "content"


def test_what_another_user_wrote_into_the_file_is_printed_harmlessly(path: Path) -> None:
    with other("environment", path) as process:
        assert line(process) == "held"
        path.write_text(f'{{"command": "\\u001b[2Jx", "pid": {os.getppid()}, "since": 0}}\nnot JSON\n[1]\n')
        with pytest.raises(UserError) as found:
            take(path)
        assert "\x1b" not in str(found.value)
