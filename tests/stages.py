"""Run stages beside each other: print each test as it ends, count all of them, and end every process that was started.

A stage prints a line per test, as pytest -v, terraform test and tests/molecule/run.py do. A stage without such lines is
one test, which passes if the stage exits with 0.
"""

from __future__ import annotations

import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from schedule import History, Stage, startable, time_left

from cluster.core.process import die_with_parent

RESULT = re.compile(
    # The name of a test may contain such a word too: only a percentage, a reason or a time may follow the result.
    r"(?P<test>\S.*::.*?) (?P<result>PASSED|FAILED|ERROR|SKIPPED)( +(\[ *\d+%\]|\(.*|[\d.]+ s))?"
    r'|\s*run "(?P<run>.*)"\.\.\. (?P<outcome>pass|fail|skip|error)'
)
COLLECTED = re.compile(r"collected (\d+) items?(?: / (\d+) deselected)?")
# What follows is about tests that have already been counted, and may quote the output of other test runs.
DETAILS = re.compile(r"=+ (FAILURES|ERRORS|warnings summary|short test summary info) =+")
KIND = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}
KIND |= {"pass": "passed", "fail": "failed", "error": "failed", "skip": "skipped"}
# Seconds without a line until one says what runs.
SILENCE = 15
# Seconds that interrupted stages have to remove their nodes.
GRACE = 90


@dataclass
class Running:
    """A started stage and what its output says so far."""

    stage: Stage
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    expected: float
    begin: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    # The end of the output that has no newline yet: pytest prints a test's name there while the test runs.
    rest: str = ""
    collected: int | None = None
    details: bool = False
    shown: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    @property
    def ended(self) -> int:
        return sum(self.counts.values())

    def read(self, data: bytes) -> list[tuple[str, str]]:
        """The tests that ended in this piece of output, as (kind, name)."""
        self.log.write(data)
        self.log.flush()
        *lines, self.rest = (self.rest + data.decode(errors="replace")).split("\n")
        return [found for line in lines if (found := self.line(line.rstrip()))]

    def line(self, line: str) -> tuple[str, str] | None:
        self.details = self.details or bool(DETAILS.fullmatch(line))
        if not self.details and (match := RESULT.fullmatch(line)):
            kind = KIND[match["result"] or match["outcome"]]
            self.counts[kind] += 1
            return kind, match["test"] or match["run"]
        if found := COLLECTED.search(line):
            self.collected = int(found[1]) - int(found[2] or 0)
        self.shown.append(line)
        return None

    def close(self) -> str:
        """Complete the counts after the process has ended. Returns why the stage failed, or nothing."""
        code = self.process.returncode
        missing = (self.collected or 0) - self.ended
        why = "" if code == 0 else f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if not why and missing > 0:
            why = f"{missing} of {self.collected} tests did not run"
        if not why and not self.ended:
            self.counts["passed"] = 1
        if why and not self.counts["failed"]:
            self.counts["failed"] = 1
        return why or ("tests failed" if self.counts["failed"] else "")

    @property
    def current(self) -> str:
        """The test that runs now, or the last line that the stage printed."""
        text = self.rest.strip() or next((line.strip() for line in reversed(self.shown) if line.strip()), "starting")
        # pytest ends the line of a module's last test after its fixtures are gone.
        test, _, result = text.rpartition(" ")
        return f"clean-up after {test}" if result in KIND else text


class Run:
    def __init__(
        self,
        stages: Iterable[Stage],
        history: History,
        logs: Path,
        env: Mapping[str, str],
        budget: float = 2,
        cwd: Path | None = None,
    ) -> None:
        self.waiting, self.history, self.logs, self.budget = list(stages), history, logs, budget
        self.env, self.cwd = env, cwd
        self.running: list[Running] = []
        self.ended: list[str] = []
        self.counts: Counter[str] = Counter()
        self.summary: list[str] = []
        self.selector = selectors.DefaultSelector()
        self.begin = self.last_line = time.monotonic()
        self.interrupted = False
        self.live = sys.stdout.isatty()

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.interrupt)
        while (self.waiting or self.running) and not self.interrupted:
            for stage in startable(self.waiting, self.left(), self.ended, self.budget, self.history.seconds):
                self.start(stage)
            if not self.running:
                self.give_up()
            self.read()
        if self.interrupted:
            self.stop()
        print(*self.summary, sep="\n")
        print(f"{time.monotonic() - self.begin:.0f} s in all")
        print("{} passed, {} failed, {} skipped".format(*(self.counts[k] for k in ("passed", "failed", "skipped"))))
        sys.stdout.flush()
        return 1 if self.counts["failed"] else 0

    def start(self, stage: Stage) -> None:
        self.waiting.remove(stage)
        self.logs.mkdir(parents=True, exist_ok=True)
        log = (self.logs / f"{re.sub('[^a-z0-9]+', '-', stage.name.lower())}.log").open("wb")
        # Measuring stages never run side by side, and what the others deploy need not wait for them.
        own = {} if stage.measures else {"HOROVOD_CLUSTER_MACHINE_LOCK": f"{log.name}.lock"}
        process = subprocess.Popen(
            stage.argv,
            cwd=self.cwd,
            env={**self.env, **own, **stage.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert process.stdout is not None
        started = Running(stage, process, log, self.history.seconds(stage))
        self.running.append(started)
        self.selector.register(process.stdout, selectors.EVENT_READ, started)

    def read(self) -> None:
        """Wait for output for up to a second, then look which stages have ended."""
        for key, _ in self.selector.select(1):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self.selector.unregister(key.fileobj)
            for kind, test in key.data.read(data):
                self.counts[kind] += 1
                self.say(f"{kind:7s} {key.data.stage.name:22s} {test}", left=True)
        for one in [one for one in self.running if one.process.poll() is not None]:
            self.finish(one)
        now = "; ".join(f"{one.stage.name}: {one.current} ({one.seconds:.0f} s)" for one in self.running)
        if self.live:
            # Without a newline: the next line replaces it.
            print(f"\r\033[K{now[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        elif time.monotonic() - self.last_line >= SILENCE and self.running:
            self.say(f"running {now}", left=True)

    def finish(self, one: Running) -> None:
        end_group(one.process.pid, signal.SIGKILL)
        output = one.process.stdout
        assert output is not None
        if output in self.selector.get_map():
            self.selector.unregister(output)
        # A process outside the group may still hold the output open: take what is there, do not wait for its end.
        os.set_blocking(output.fileno(), False)
        before = one.counts.copy()
        for kind, test in one.read((output.read() or b"") + b"\n"):
            self.say(f"{kind:7s} {one.stage.name:22s} {test}", left=True)
        output.close()
        one.log.close()
        self.running.remove(one)
        why = one.close()
        self.counts += one.counts - before
        counted = ", ".join(f"{number} {kind}" for kind, number in one.counts.items() if number)
        result = f"{'FAIL' if why else 'ok  '} {one.stage.name:22s} {one.seconds:5.0f} s  {counted}"
        if why:
            result += f" ({why}; {one.log.name})"
            print(f"\n=== {one.stage.name} ===", *one.shown, sep="\n")
        else:
            self.ended.append(one.stage.name)
            self.history.add(one.stage.name, one.seconds, one.ended)
        self.summary.append(result)
        self.say(result, left=True)

    def give_up(self) -> None:
        """Only stages are left whose predecessor failed."""
        for stage in self.waiting:
            self.summary.append(f"FAIL {stage.name:22s} not run: {stage.after} failed")
            self.counts["failed"] += 1
        self.waiting = []

    def left(self) -> dict[Stage, float]:
        """Seconds left of each running stage. One that takes longer than expected is taken to need a tenth more."""
        return {one.stage: max(one.expected - one.seconds, one.seconds / 10) for one in self.running}

    def say(self, text: str, left: bool = False) -> None:
        if left:
            tests = sum(map(self.history.tests, self.waiting))
            tests += sum(max((one.collected or self.history.tests(one.stage)) - one.ended, 0) for one in self.running)
            seconds = time_left(self.waiting, self.left(), self.ended, self.budget, self.history.seconds)
            text += f"  [{tests} left, about {seconds // 60:.0f}:{seconds % 60:02.0f}]"
        print(f"\r\033[K{text}" if self.live else text, flush=True)
        self.last_line = time.monotonic()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            self.end_all(signal.SIGKILL)
        self.interrupted = True

    def end_all(self, number: int) -> None:
        for one in self.running:
            end_group(one.process.pid, number)

    def stop(self) -> None:
        """End the stages that run. They and those that never ran count as failed."""
        self.say("interrupted: the stages remove what they made; interrupt again to end them at once")
        for stage in [*(one.stage for one in self.running), *self.waiting]:
            self.summary.append(f"FAIL {stage.name:22s} interrupted")
            self.counts["failed"] += 1
        # pytest removes nodes after SIGINT, tests/molecule/run.py after SIGTERM and SIGINT.
        self.end_all(signal.SIGINT)
        deadline = time.monotonic() + GRACE
        while any(one.process.poll() is None for one in self.running) and time.monotonic() < deadline:
            for key, _ in self.selector.select(0.2):
                if not os.read(key.fd, 1 << 16):
                    self.selector.unregister(key.fileobj)
        self.end_all(signal.SIGKILL)
        for one in self.running:
            one.process.wait()


def end_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
