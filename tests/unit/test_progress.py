"""What a command shows while it runs: the current task of every part, on a terminal and in a log."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from cluster.core import progress
from cluster.core.config import ROOT
from cluster.core.errors import InfraError
from cluster.core.process import PlaybookTasks, run_logged
from cluster.core.progress import Progress
from cluster.terraform import Changes

sys.path.insert(0, str(ROOT / "tests/e2e"))
import silence

PLAYBOOK = """
PLAY [Install the roles] *******************************************************

TASK [horovod : Compile] *******************************************************
changed: [w1]
ok: [w2] => (item=a)
ok: [w2] => (item=b)

RUNNING HANDLER [fabric : Set the rate] ****************************************
fatal: [w1]: FAILED! => {"msg": "no such device"}

PLAY RECAP *********************************************************************
w1    : ok=1    changed=1    unreachable=0    failed=1
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "CACHE", tmp_path / "cache")


def make(terminal: bool = False, width: int = 100) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, soft_wrap=True, highlight=False, markup=False)
    return Progress("env", console=console), out


def wait_for(text: str, out: io.StringIO) -> None:
    end = time.monotonic() + 20
    while text not in out.getvalue():
        assert time.monotonic() < end, f"{text!r} was not shown: {out.getvalue()}"
        time.sleep(0.01)


def test_log_repeats_what_every_part_does_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.05)
    shown, out = make()
    with shown.phase("image"):
        shown.now("horovod", "compiling, 3 of 77 files")
        wait_for(": compiling, 3 of 77 files\n", out)
        shown.now("wheels", "120 MB")
        shown.now("horovod", "compiling, 4 of 77 files")
        wait_for("horovod: compiling, 4 of 77 files; wheels: 120 MB\n", out)
        shown.now("horovod", "")
        wait_for("): 120 MB\n", out)
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("image") and "image: done in" in lines[-1]


def test_log_gets_no_repeated_line_while_other_lines_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 60.0)
    shown, out = make()
    with shown.phase("image"):
        shown.now("root", "packages")
        shown("root file system is ready")
    assert len(out.getvalue().splitlines()) == 3


def test_polled_part_shows_what_is_read_until_the_block_ends() -> None:
    progress = Progress("x")
    answers = iter(["", "1 MB"])
    read = threading.Event()

    def answer() -> str:
        text = next(answers, "2 MB")
        if text == "2 MB":
            read.set()
        return text

    with progress.polled("wheels", answer, 0.001):
        assert read.wait(10)
        while progress.current() != ["2 MB"]:
            time.sleep(0.001)
    assert progress.current() == []


def test_terminal_shows_one_line_and_one_more_per_part() -> None:
    shown, out = make(terminal=True)
    with shown.phase("image"):
        shown.now("root", "unpacking systemd")
        wait_for(" s): unpacking systemd", out)
        shown.now("wheels", "120 MB")
        wait_for("  root: unpacking systemd", out)
        wait_for("  wheels: 120 MB", out)
        shown("a line that stays")
    assert re.search(r"\] a line that stays", out.getvalue())


def test_terminal_line_is_never_wider_than_the_terminal() -> None:
    shown, out = make(terminal=True, width=40)
    with shown.phase("image"):
        shown.now("root", "unpacking " + 100 * "x")
        wait_for("unpacking xx", out)
    escapes = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
    assert max(len(line) for line in re.split(r"[\r\n]+", escapes.sub("", out.getvalue()))) <= 40


def test_expected_time_is_learnt_from_the_last_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LEARN_FROM_SECONDS", 0.0)
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.02)
    first, out = make()
    with first.phase("image"):
        first.now("root", "packages")
        wait_for("packages", out)
    assert "usually" not in out.getvalue()
    again, out = make()
    with again.phase("image"):
        again.now("root", "packages")
        wait_for("s, usually 0 s): packages", out)
    other = Progress("other", console=Console(file=io.StringIO()))
    assert other._durations.of("image") is None, "another environment has other durations"


def test_phase_with_nothing_to_do_teaches_no_duration() -> None:
    shown, _ = make()
    with shown.phase("image"):
        pass
    assert shown._durations.of("image") is None


def test_failed_phase_teaches_no_duration_and_is_not_called_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LEARN_FROM_SECONDS", 0.0)
    shown, out = make()
    with pytest.raises(InfraError), shown.phase("image"):
        raise InfraError("no disk")
    assert shown._durations.of("image") is None
    assert "done" not in out.getvalue()


def test_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LEARN_FROM_SECONDS", 0.0)
    (tmp_path / "cache").write_text("a file where the folder should be")
    shown, out = make()
    with shown.phase("image"):
        pass
    assert "image: done" in out.getvalue()


def test_many_threads_print_and_set_parts_on_a_terminal_without_deadlock() -> None:
    shown, out = make(terminal=True)

    def work(name: str) -> None:
        for number in range(200):
            shown.now(name, f"step {number}")
            shown(f"{name} {number}")

    with shown.phase("image"):
        threads = [threading.Thread(target=work, args=(f"part{n}",), daemon=True) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert out.getvalue().count("] part3 ") == 200


def test_playbook_shows_role_task_and_finished_nodes() -> None:
    seen: list[str] = []
    watch = PlaybookTasks(seen.append)
    for line in PLAYBOOK.splitlines():
        watch(line)
    assert seen == [
        "horovod: Compile",
        "horovod: Compile, nodes done: 1",
        "horovod: Compile, nodes done: 2",
        "horovod: Compile, nodes done: 2",
        "fabric: Set the rate",
        "fabric: Set the rate, nodes done: 1",
        "",
    ]


def test_terraform_shows_what_it_creates_and_how_much_of_its_plan_is_done() -> None:
    shown, _ = make()
    watch = Changes(shown)
    watch("Plan: 3 to add, 0 to change, 1 to destroy.")
    assert shown.current() == ["0 of 4 changes done"]
    watch('module.net["a"].terraform_data.network["fabric"]: Creating...')
    watch('terraform_data.node["w1"]: Destroying... [id=5]')
    assert shown.current() == ["0 of 4 changes done; creating network fabric; destroying node w1"]
    watch('terraform_data.node["w1"]: Still destroying... [id=5, 00m10s elapsed]')
    watch('terraform_data.node["w1"]: Destruction complete after 11s')
    watch("aws_placement_group.this: Creating...")
    assert shown.current() == ["1 of 4 changes done; creating network fabric; creating this"]


def test_phase_without_lines_of_its_own_still_shows_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.05)
    shown, out = make()
    with shown.phase("dry run", quiet=True):
        pass
    assert out.getvalue() == ""
    with shown.phase("dry run", quiet=True):
        shown.now("trials", "400 trials")
        wait_for("400 trials", out)


def test_output_is_seen_while_the_tool_runs(tmp_path: Path) -> None:
    """The tool waits for a file that is made when its first line was seen."""
    flag = tmp_path / "flag"
    code = (
        "import pathlib, sys, time\n"
        "print('first', flush=True)\n"
        f"while not pathlib.Path({str(flag)!r}).exists(): time.sleep(0.01)\n"
        "sys.stdout.write('50%\\rsecond')"
    )
    seen: list[str] = []

    def watch(line: str) -> None:
        seen.append(line)
        flag.touch()

    output = run_logged([sys.executable, "-c", code], tmp_path / "log", {}, "tool", watch=watch)
    assert seen == ["first", "50%", "second"]
    assert output.split() == ["first", "50%", "second"]
    assert "second" in (tmp_path / "log").read_text()


def test_reason_of_a_failure_is_found_with_a_watcher(tmp_path: Path) -> None:
    code = "print('fatal: no such host'); raise SystemExit(4)"
    with pytest.raises(InfraError, match=r"tool failed .exit 4.: fatal: no such host"):
        run_logged([sys.executable, "-c", code], tmp_path / "log", {}, "tool", watch=lambda line: None)


def test_failing_watcher_ends_the_tool(tmp_path: Path) -> None:
    def watch(line: str) -> None:
        raise ValueError(line)

    begin = time.monotonic()
    with pytest.raises(ValueError, match="started"):
        code = "import time; print('started', flush=True); time.sleep(300)"
        run_logged([sys.executable, "-c", code], tmp_path / "log", {}, "tool", watch=watch)
    assert time.monotonic() - begin < 200


def test_live_line_reaches_the_terminal_as_it_is() -> None:
    """The commands replace sys.stdout by a stream that shows control characters; the live line consists of them."""
    code = (
        "import sys, time\n"
        "from cluster.core.printable import Printable\n"
        "from cluster.core.progress import Progress\n"
        "sys.stdout, sys.stderr = Printable(sys.stdout), Printable(sys.stderr)\n"
        "shown = Progress()\n"
        "with shown.phase('image', quiet=True):\n"
        "    shown.now('root', 'unpacking')\n"
        "    time.sleep(1.5)\n"
        "    shown('a line that stays')\n"
    )
    found = silence.record([sys.executable, "-c", code], terminal=True, cwd=ROOT)
    assert found.returncode == 0, found.text
    assert "\x1b[2K" in found.text
    assert "\\x" not in found.text
