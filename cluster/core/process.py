"""Run the tools we stand on: output into a log, one line when they fail, nothing left behind when we are killed."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import IO

from cluster.core.errors import InfraError

# Variables that everything we start inherits: the state folder it works on, and the command that started it.
MARKER = "HOROVOD_CLUSTER_STATE"
OWNER = "HOROVOD_CLUSTER_OWNER"
PR_SET_PDEATHSIG = 1
END_SECONDS = 10.0


def die_with_parent() -> None:
    """For preexec_fn: the child gets SIGTERM when we die, however we die."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def hide_in_process_list(values: Sequence[str]) -> None:
    """Overwrite values among this process's arguments with stars: every user of this machine can list them."""
    # proc(5): fields 48 and 49 say where in memory the arguments are; the first field after the name is the third.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    words = ctypes.string_at(begin, end - begin)
    for value in filter(None, map(os.fsencode, values)):
        at = words.find(b"=" + value + b"\0")
        while at >= 0:
            ctypes.memset(begin + at + 1, ord("*"), len(value))
            at = words.find(b"=" + value + b"\0", at + 1)


# Sees each line of a tool's output while the tool runs.
Watch = Callable[[str], None]


def run_logged(
    argv: Sequence[str | Path],
    log: Path,
    env: Mapping[str, str],
    what: str,
    cwd: Path | None = None,
    watch: Watch | None = None,
    explain: Callable[[str], str] | None = None,
) -> str:
    """Run argv with its output appended to log; raise InfraError with the reason when it fails; return the output.

    explain: finds the reason in the output, if the tool has its own way to say it.

    Tools that run side by side need a log each.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(map(str, argv))}\n".encode())
        out.flush()
        start = out.tell()
        process = Popen(argv, stdin=DEVNULL, stdout=out, stderr=STDOUT, env=env, cwd=cwd, preexec_fn=die_with_parent)
        try:
            follow(process, log, start, watch)
        except BaseException:
            # Terraform and Ansible record what they did before they end.
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except TimeoutExpired:
                process.kill()
                process.wait()
            raise
    with log.open(errors="replace") as written:
        written.seek(start)
        output = written.read()
    if process.returncode:
        why = (explain or reason)(output)
        raise InfraError(f"{what} failed (exit {process.returncode}): {why}; the whole output is in {log}")
    return output


def follow(process: Popen[bytes], log: Path, start: int, watch: Watch | None) -> None:
    """Wait for the process, and hand each complete line of its log to watch.

    The log is read, not a pipe: a daemon that a tool leaves behind would hold a pipe open.
    """
    if watch is None:
        process.wait()
        return
    with log.open("rb") as lines:
        lines.seek(start)
        rest = b""
        while True:
            with suppress(TimeoutExpired):
                process.wait(0.2)
            ended = process.returncode is not None
            *complete, rest = re.split(rb"[\r\n]+", rest + lines.read())
            for line in [*complete, rest] if ended and rest else complete:
                watch(line.decode(errors="replace"))
            if ended:
                return


class Lines(threading.Thread):
    """Reads a pipe of a process to its end, and hands each line to watch as it comes."""

    def __init__(self, pipe: IO[str] | None, watch: Watch = lambda line: None) -> None:
        super().__init__(daemon=True)
        self.pipe, self.watch, self.lines = pipe, watch, list[str]()
        self.start()

    def run(self) -> None:
        for line in self.pipe or ():
            self.lines.append(line)
            self.watch(line.rstrip("\n"))

    def text(self) -> str:
        self.join()
        return "".join(self.lines)


class PlaybookTasks:
    """For watch: shows the current task of ansible-playbook, and how many nodes have done it."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show, self.task = show, ""
        self.nodes: set[str] = set()

    def __call__(self, line: str) -> None:
        if match := re.match(r"(?:TASK|RUNNING HANDLER) \[(.+)\]", line):
            self.task, self.nodes = match[1].replace(" : ", ": "), set()
            self.show(self.task)
        elif match := re.match(r"FAILED - RETRYING: \[([^\]]+)\]", line):
            self.show(f"{self.task}: waiting for {match[1]}")
        elif match := re.match(r"(?:ok|changed|failed|fatal|skipping|unreachable): \[([^\] ]+)", line):
            self.nodes.add(match[1])
            self.show(f"{self.task}, nodes done: {len(self.nodes)}")
        elif line.startswith("PLAY RECAP"):
            self.show("")


def reason(output: str) -> str:
    """The line of a tool's output that says why it failed."""
    lines = [line.strip(" │╷╵|") for line in output.splitlines()]
    lines = [line for line in lines if line]
    marks = ("fatal:", "Error:", "FAILED!", "[ERROR]", "error:")
    marked = [line for mark in marks for line in lines if mark in line]
    return [*marked, *lines[-1:], "no output"][0][:600]


def marks(state_dir: Path) -> dict[str, str]:
    return {MARKER: str(state_dir), OWNER: identity(os.getpid())}


def identity(pid: int) -> str:
    """A process id with its start time, because ids are used again. Empty if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else f"{pid}-{fields[19]}"


def end_leftovers(state_dir: Path) -> int:
    """End what a killed command left running on this state folder, and what this command itself left.

    What belongs to a command that lives stays: an open `make shell`, or a sweep.
    """
    ended: set[int] = set()
    # A leftover that ends may leave processes of its own.
    while found := leftovers(state_dir) - ended:
        for number, pause in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 1.0)):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + pause
            while time.monotonic() < deadline and any(map(identity, found)):
                time.sleep(0.05)
        ended |= found
    return len(ended)


def leftovers(state_dir: Path) -> set[int]:
    wanted = f"{MARKER}={state_dir}".encode()
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            owner = next((v.partition(b"=")[2].decode() for v in variables if v.startswith(f"{OWNER}=".encode())), "")
            pid = int(owner.partition("-")[0] or 0)
            alive = bool(owner) and identity(pid) == owner and pid != os.getpid()
            if wanted in variables and not alive and int(entry.name) not in (os.getpid(), os.getppid()):
                found.add(int(entry.name))
    return found
