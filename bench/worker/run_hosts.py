"""Which nodes an elastic run can use now: those that answer, have the run's agent, and will not be taken away.

Threads on the head, beside horovodrun. Its host discovery script prints the file that they write.
"""

import json
import os
import shlex
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from bench.worker import run_agent

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
CLEAR = """import socket
s = socket.socket(socket.AF_UNIX)
s.connect("{socket}")
s.sendall(b'{{"clear": true}}\\n')
s.recv(9)
"""
# Newer SSH servers refuse a host for a while that connects every second and does not log in.
PAUSE = 2.0
SECONDS_TO_ANSWER = 3.0
# A node that is merely busy answers later.
MISSES = 3
SECONDS_TO_PREPARE = 30


def clear_command(run: str) -> str:
    """Ends every process of the run on a node but its agent."""
    return shlex.join(["python3", "-c", CLEAR.format(socket=run_agent.runtime(run) / "socket")])


def answers(host: str, port: int = 22) -> bool:
    """Whether the SSH server says something: the kernel of a node that hangs accepts connections, but no more."""
    try:
        with socket.create_connection((host, port), SECONDS_TO_ANSWER) as connection:
            connection.settimeout(SECONDS_TO_ANSWER)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def prepare(host: str, folder: Path, run: str, variables: str) -> bool:
    """Start the agent of a node that came later or came back. What an earlier rank left there ends."""
    runtime = run_agent.runtime(run)
    command = (
        f"{{ [ -S {runtime}/socket ] || sudo -n /usr/local/sbin/run-agent {run} {folder}/worker; }} && "
        f"{clear_command(run)} && {{ [ -s {runtime}/variables ] || (umask 077; cat > {runtime}/variables); }}"
    )
    argv = ["sh", "-c", command] if host == os.uname().nodename else [*SSH, host, command]
    try:
        return not subprocess.run(
            argv, input=variables.encode(), capture_output=True, timeout=SECONDS_TO_PREPARE, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return False


class Hosts:
    """Keeps the file of the nodes that can be used, one line `name:slots` each."""

    def __init__(self, folder: Path, run: dict[str, Any], file: Path, log: Path) -> None:
        self.folder, self.run, self.file, self.log = folder, run, file, log
        self.usable: set[str] = set()
        self.looked: set[str] = set()
        self.changed = threading.Condition()
        self.ended = threading.Event()

    def start(self, hosts: list[str]) -> None:
        for host in hosts:
            threading.Thread(target=self.watch, args=(host,), daemon=True).start()

    def wait(self, hosts: list[str], least: int, seconds: float) -> bool:
        """Wait until every node has been looked at. Whether there are enough to start."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while not (self.looked >= set(hosts)) or len(self.usable) < least:
                if not self.changed.wait(max(deadline - time.monotonic(), 0)) and time.monotonic() >= deadline:
                    break
            return len(self.usable) >= least

    def watch(self, host: str) -> None:
        missed = 0
        while not self.ended.is_set():
            missed = 0 if answers(host) else missed + 1
            if (self.folder / "draining" / host).exists():
                self.set(host, False, "is about to be taken away")
            elif missed >= MISSES:
                self.set(host, False, "does not answer")
            elif not missed and host not in self.usable:
                variables = json.dumps(run_agent.variables(self.run["id"]))
                self.set(host, prepare(host, self.folder, self.run["id"], variables), "has no agent")
            with self.changed:
                self.looked.add(host)
                self.changed.notify_all()
            self.ended.wait(PAUSE)

    def set(self, host: str, usable: bool, reason: str) -> None:
        with self.changed:
            if usable == (host in self.usable):
                return
            self.usable ^= {host}
            slots = self.run["gpus_per_node"]
            temporary = self.file.with_suffix(".tmp")
            temporary.write_text("".join(f"{name}:{slots}\n" for name in sorted(self.usable)))
            temporary.replace(self.file)
            row = {"time": time.time(), "host": host, "usable": usable, "reason": "" if usable else reason}
            with self.log.open("a") as log:
                log.write(json.dumps(row) + "\n")
            self.changed.notify_all()
