"""Run the tools we stand on: output into a log, one line when they fail, nothing left behind when we are killed."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, STDOUT

from cluster.core.errors import InfraError

MARKER = "HOROVOD_CLUSTER_STATE"
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """For preexec_fn: the child gets SIGTERM when we die, however we die."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_logged(
    argv: Sequence[str | Path], log: Path, env: Mapping[str, str], what: str, cwd: Path | None = None
) -> str:
    """Run argv with its output appended to log; raise InfraError with the reason when it fails; return the output."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        out.write(f"\n$ {' '.join(map(str, argv))}\n")
        out.flush()
        start = out.tell()
        code = subprocess.call(
            argv, stdin=DEVNULL, stdout=out, stderr=STDOUT, env=env, cwd=cwd, preexec_fn=die_with_parent
        )
    with log.open() as written:
        written.seek(start)
        output = written.read()
    if code:
        raise InfraError(f"{what} failed (exit {code}): {reason(output)}; the whole output is in {log}")
    return output


def reason(output: str) -> str:
    """The line of a tool's output that says why it failed."""
    lines = [line.strip(" │╷╵|") for line in output.splitlines()]
    lines = [line for line in lines if line]
    marks = ("fatal:", "Error:", "FAILED!", "[ERROR]", "error:")
    marked = [line for mark in marks for line in lines if mark in line]
    return [*marked, *lines[-1:], "no output"][0][:600]


def end_leftovers(state_dir: Path) -> int:
    """End processes of an earlier, killed run on this state folder. They are known by a variable we gave them."""
    wanted = f"{MARKER}={state_dir}".encode()
    own = {os.getpid(), os.getppid()}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) not in own and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    for number, pause in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 1.0)):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and any(Path(f"/proc/{pid}/stat").exists() for pid in found):
            time.sleep(0.05)
    return len(found)
