"""Reads a command's output with a clock: is it ever silent, and does its text change, not only its clock?

recording = record(["make", "deploy"], terminal=True)
assert problems(recording) == []
"""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Seconds. Without a terminal a line is promised every 15.
LONGEST_GAP = {True: 5.0, False: 20.0}
LONGEST_UNCHANGED = 30.0
ROWS, COLUMNS = 40, 120
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]")
# Elapsed, expected and remaining time, clocks, and the characters of spinners and bars.
TIME = re.compile(r"\d+(?:\.\d+)? ?(?:ms|s|min|h)\b|\d+:\d\d(?::\d\d)?|[\u2800-\u28ff|/\\\u2500-\u259f]")


@dataclass
class Recording:
    """Output in parts, each with the seconds since the start."""

    terminal: bool
    parts: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0
    returncode: int = 0

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.parts)


def record(
    argv: Sequence[str | Path],
    *,
    terminal: bool,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 1800,
) -> Recording:
    """Run a command, in a pseudo terminal or with its output in a pipe."""
    if terminal:
        reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    else:
        reader, writer = os.pipe()
    recording, begin = Recording(terminal), time.monotonic()
    variables = {**os.environ, **(env or {}), **({"TERM": "xterm"} if terminal else {})}
    process = subprocess.Popen(
        [str(word) for word in argv],
        cwd=cwd,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
    )
    os.close(writer)
    try:
        while data := read(reader, process, begin + timeout):
            recording.parts.append((time.monotonic() - begin, data.decode(errors="replace")))
    finally:
        os.close(reader)
        if process.poll() is None and time.monotonic() > begin + timeout:
            os.killpg(process.pid, signal.SIGTERM)
        recording.returncode = process.wait()
        recording.seconds = time.monotonic() - begin
    return recording


def read(reader: int, process: subprocess.Popen[bytes], end: float) -> bytes:
    """The next output; empty after the end of the process or of the time."""
    while time.monotonic() < end:
        if select.select([reader], [], [], 0.1)[0]:
            try:
                return os.read(reader, 65536)
            except OSError:  # The pseudo terminal has no writer any more.
                return b""
        # A daemon may hold the pipe open.
        if process.poll() is not None and not select.select([reader], [], [], 0)[0]:
            return b""
    return b""


def redraws(parts: Iterable[tuple[float, str]]) -> Iterable[tuple[float, str]]:
    """Every complete line, or redraw of a line, without escapes; with the time at which it was complete."""
    rest = ""
    for at, text in parts:
        *complete, rest = re.split(r"[\r\n]+", rest + text)
        for line in complete:
            yield at, ESCAPE.sub("", line).rstrip()


def lines(parts: Iterable[tuple[float, str]]) -> Iterable[tuple[float, str]]:
    """The same without times; what is empty then is left out."""
    for at, line in redraws(parts):
        if plain := " ".join(TIME.sub("", line).split()):
            yield at, plain


def longest_gap(recording: Recording) -> tuple[float, str]:
    """The longest time without a byte of output, and the line before it."""
    times = [0.0, *(at for at, _ in recording.parts), recording.seconds]
    longest, start = max((after - before, before) for before, after in itertools.pairwise(times))
    return longest, last_line(recording, start)


def longest_unchanged(recording: Recording) -> tuple[float, str]:
    """The longest time without a line that was not there before, and the line before it."""
    seen: set[str] = set()
    times = [0.0]
    for at, line in lines(recording.parts):
        if line not in seen:
            seen.add(line)
            times.append(at)
    times.append(recording.seconds)
    longest, start = max((after - before, before) for before, after in itertools.pairwise(times))
    return longest, last_line(recording, start)


def last_line(recording: Recording, at: float) -> str:
    return ([line for moment, line in lines(recording.parts) if moment <= at] or ["the start"])[-1]


def problems(recording: Recording) -> list[str]:
    """What a user would call silence."""
    found = []
    limit = LONGEST_GAP[recording.terminal]
    gap, after = longest_gap(recording)
    if gap > limit:
        found.append(f"no output for {gap:.1f} s (at most {limit:.0f}) after: {after}")
    unchanged, after = longest_unchanged(recording)
    if unchanged > LONGEST_UNCHANGED:
        found.append(f"the same text for {unchanged:.1f} s (at most {LONGEST_UNCHANGED:.0f}) after: {after}")
    return found
