"""The reader of tests/e2e that finds silence in a command's output."""

from __future__ import annotations

import sys

import pytest

from cluster.core.config import ROOT

sys.path.insert(0, str(ROOT / "tests/e2e"))
import silence


def recording(*parts: tuple[float, str], terminal: bool = True, seconds: float | None = None) -> silence.Recording:
    return silence.Recording(terminal, list(parts), parts[-1][0] if seconds is None else seconds)


def live(text: str) -> str:
    return f"\r\x1b[2K{text}"


def test_changing_text_is_no_silence():
    parts = [(float(at), live(f"image ({at} s, usually 90 s): compiling, {at // 20} of 77 files")) for at in range(90)]
    assert silence.problems(recording(*parts)) == []


def test_clock_and_spinner_alone_are_silence():
    spinner = "⠋⠙⠹⠸"
    parts = [
        (float(at), live(f"{spinner[at % 4]} [{at:6.1f} s] image ({at} s): compiling, 0:{at:02}")) for at in range(60)
    ]
    (problem,) = silence.problems(recording(*parts))
    assert problem.startswith("the same text for 5")
    assert "image (): compiling" in problem


def test_text_of_several_parts_that_alternate_is_one_text():
    parts = [(float(at), live("root: unpacking") + "\n" + live("wheels: fetching")) for at in range(60)]
    (problem,) = silence.problems(recording(*parts))
    assert "the same text" in problem


@pytest.mark.parametrize(("terminal", "gap", "silent"), [(True, 4, 0), (True, 6, 1), (False, 19, 0), (False, 21, 1)])
def test_gap_is_longer_in_a_log_than_on_a_terminal(terminal, gap, silent):
    parts = [(float(number * gap), f"line {number}\n") for number in range(1, 5)]
    found = silence.problems(recording(*parts, terminal=terminal))
    assert len(found) == silent


def test_silence_at_the_start_and_at_the_end_counts():
    assert "after: the start" in silence.problems(recording((9.0, "a\n")))[0]
    assert "after: a" in silence.problems(recording((1.0, "a\n"), seconds=9.0))[0]


def test_line_that_arrives_in_two_reads_is_one_line():
    assert [line for _, line in silence.lines([(1.0, "comp"), (2.0, "iling\ndone\n")])] == ["compiling", "done"]


@pytest.mark.parametrize("terminal", [True, False])
def test_recorded_command_sees_a_terminal_only_if_there_is_one(terminal):
    code = "import sys; print(sys.stdout.isatty(), sys.stderr.isatty()); sys.exit(3)"
    found = silence.record([sys.executable, "-c", code], terminal=terminal)
    assert found.text.split() == [str(terminal)] * 2
    assert found.returncode == 3
    assert found.parts[0][0] <= found.seconds


def test_command_that_never_ends_is_ended():
    found = silence.record([sys.executable, "-c", "import time; time.sleep(600)"], terminal=False, timeout=0.3)
    assert found.returncode < 0


def test_daemon_that_keeps_the_pipe_open_is_not_waited_for():
    code = "import subprocess; print('started'); subprocess.Popen(['sleep', '20'])"
    found = silence.record([sys.executable, "-c", code + "; print('ended')"], terminal=False, timeout=300)
    assert "ended" in found.text
    assert found.returncode == 0
