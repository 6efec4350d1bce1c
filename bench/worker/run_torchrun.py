"""Start torchrun on every node that an elastic run can use, also on those that come later: run_torchrun HOSTS COMMAND.

HOSTS is the file of run_hosts.py. Each torchrun finds the others, and starts its ranks again when one is lost.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from bench.worker import run_hosts

# A node that hangs closes no connection.
SSH = (*run_hosts.SSH, "-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=2")
PAUSE = 1.0
# A node that ended with an error is tried again after this long.
SECONDS_UNTIL_AGAIN = 5.0
# For the others to end, after one node has finished.
SECONDS_TO_FINISH = 30.0


def start(host: str, words: list[str]) -> "subprocess.Popen[bytes]":
    inside = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"
    argv = words if host == os.uname().nodename else [*SSH, host, inside]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL)


def main() -> None:
    file, words = Path(sys.argv[1]), sys.argv[2:]
    running: dict[str, subprocess.Popen[bytes]] = {}
    ended: dict[str, float] = {}
    finished = 0.0
    while True:
        now = time.monotonic()
        for host, process in list(running.items()):
            if (code := process.poll()) is not None:
                del running[host]
                ended[host] = now
                finished = finished or (now if code == 0 else 0.0)
        if finished and (not running or now > finished + SECONDS_TO_FINISH):
            sys.exit(0)
        if ended and not running:
            sys.exit(1)
        if not finished:
            for host in [line.partition(":")[0] for line in file.read_text().splitlines()]:
                if host not in running and now > ended.get(host, -SECONDS_UNTIL_AGAIN) + SECONDS_UNTIL_AGAIN:
                    running[host] = start(host, words)
        time.sleep(PAUSE)
