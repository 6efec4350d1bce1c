"""Run a launcher in an allocation of Slurm. Both end when the controller goes away (standard input closes).

    slurm_launch salloc OPTIONS COMMAND      on the head; prints the allocation's number and state as events

An allocation that Slurm takes away for more important jobs is requested again.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time

from bench.worker import slurm_queue
from bench.worker.protocol import Allocation, emit
from bench.worker.slurm_queue import Job

PR_SET_PDEATHSIG = 1
# salloc says this on standard error.
NUMBER = re.compile(r"salloc: (Pending|Granted) job allocation (\d+)")
POLL_SECONDS = 5.0
# A node that restarts is back by then.
MOST_UNAVAILABLE = 60.0
MOST_COMPLETING = 15.0
UNFINISHED = ("RUNNING", "COMPLETING")
MOST_PREEMPTIONS = 3
# What Slurm calls the end of a job that nobody here wanted, and what to do about it.
ENDINGS = {
    "PREEMPTED": "more important jobs took its nodes {tries} times",
    "NODE_FAIL": "a node failed ({nodes})",
    "TIMEOUT": "it reached its time limit; see MaxTime in `scontrol show partition`",
    "CANCELLED": "somebody cancelled it",
}


def squeue(*words: str) -> str:
    """Lines of squeue; empty if slurmctld does not answer."""
    try:
        done = subprocess.run(["squeue", "--noheader", *words], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout


def look(job: str) -> Job | None:
    lines = squeue("--states=all", f"--jobs={job}", f"--format={slurm_queue.FORMAT}").splitlines()
    return slurm_queue.parse(lines[-1]) if lines else None


def unavailable() -> str:
    """The nodes that do not answer Slurm, or that it gives to nobody."""
    words = ["sinfo", "--noheader", "--Node", "--states=down,drain,fail,no_respond", "--format=%N"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.split()
    except subprocess.TimeoutExpired:
        found = []
    return ", ".join(dict.fromkeys(found)) or "Slurm does not say which"


class Launch:
    """One allocation and the launcher in it."""

    def __init__(self, argv: list[str]) -> None:
        self.job = ""
        self.decided = threading.Event()  # granted, or ended without
        self.refused = ""
        # The launcher dies with us, and salloc gives its allocation back when it gets SIGTERM.
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.reporter = threading.Thread(target=self.report, daemon=True)
        self.reporter.start()

    def read(self) -> None:
        for line in self.process.stderr or ():
            sys.stderr.write(line)
            sys.stderr.flush()
            if match := NUMBER.search(line):
                self.job = match[2]
                if match[1] == "Granted":
                    emit(Allocation(self.job, "RUNNING"))
                    self.decided.set()

    def report(self) -> None:
        """Say how the request stands, until it is granted. Give up if its nodes stay unavailable."""
        since = time.monotonic()
        while not self.decided.wait(POLL_SECONDS) and self.process.poll() is None:
            found = look(self.job) if self.job else None
            if found and not self.decided.is_set():
                emit(Allocation(self.job, found.state, found.reason, found.expected))
            if not found or not slurm_queue.lacks_nodes(found):
                since = time.monotonic()
            elif time.monotonic() - since > MOST_UNAVAILABLE:
                self.refused = f"Slurm does not give out {unavailable()}: {found.reason}"
                self.end()

    def end(self) -> None:
        for number, seconds in ((signal.SIGTERM, 3), (signal.SIGKILL, 1)):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + seconds
            while self.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
        if self.job:
            # Also where salloc had no time to do so.
            subprocess.run(["scancel", self.job], capture_output=True, check=False, timeout=20)

    def wait(self) -> tuple[int, str]:
        """The launcher's exit code, and how Slurm calls the end of the allocation."""
        code = self.process.wait()
        self.decided.set()
        self.reader.join(timeout=5)
        # It may be cancelling the request.
        self.reporter.join(timeout=30)
        if not code or not self.job or self.refused:
            return code, ""
        # mpirun can end before Slurm has written down why it took the nodes.
        deadline = time.monotonic() + MOST_COMPLETING
        while (found := look(self.job)) and found.state in UNFINISHED and time.monotonic() < deadline:
            time.sleep(0.5)
        return code, found.state if found else ""


def main() -> None:
    running = [Launch(sys.argv[1:])]
    stopping = threading.Event()

    def stop(*_: object) -> None:
        stopping.set()
        running[-1].end()
        os._exit(143)

    def watch() -> None:
        while sys.stdin.buffer.read(1):
            pass
        stop()

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGTERM, stop)
    while True:
        code, state = running[-1].wait()
        while stopping.is_set():
            # The watcher is ending us.
            time.sleep(1)
        if state != "PREEMPTED" or len(running) > MOST_PREEMPTIONS:
            break
        emit(Allocation(running[-1].job, state))
        running.append(Launch(sys.argv[1:]))
    if running[-1].refused:
        print(f"Error: {running[-1].refused}; see `sinfo --list-reasons`", file=sys.stderr)
    elif why := ENDINGS.get(state):
        text = why.format(tries=len(running), nodes=unavailable() if "{nodes}" in why else "")
        print(f"Error: Slurm ended job {running[-1].job} ({state}): {text}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # The watcher is blocked in a read. A normal exit would wait for its lock and abort.
    os._exit(code & 0xFF)
