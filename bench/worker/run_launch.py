"""Supervise a run on the head: start its launcher, again after a failure if asked to, and each point of a grid in turn.

A systemd unit of the head, so that a run goes on without the controller. run_end.py always follows it.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from bench.worker import run_agent, run_hosts

SECONDS_TO_START = 60


def on_hosts(hosts: list[str], command: str) -> None:
    """Run a shell command on all hosts at once; on this one without SSH."""
    own = os.uname().nodename
    started = [
        subprocess.Popen(
            ["sh", "-c", command] if host == own else [*run_hosts.SSH, host, command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for host in hosts
    ]
    for process in started:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def write(path: Path, value: object) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1))
    temporary.replace(path)


def carry_out(folder: Path, run: dict[str, Any], point: dict[str, Any], group: dict[str, Any]) -> None:
    """One point on one group of nodes, with its restarts."""
    place = folder / point["name"]
    for name in ("logs", "out"):
        (place / name).mkdir(parents=True, exist_ok=True)
    begin = time.time()
    for attempt in range(run["max_restarts"] + 1):
        write(place / "state.json", {"state": "running", "hosts": group["hosts"], "started": begin, "attempt": attempt})
        for old in (place / "logs").glob("rank-*.json"):
            old.unlink()
        with (place / "logs/launcher.log").open("ab") as log:
            argv = [*group["argv"], str(folder), point["name"]]
            start = elastic if run.get("elastic") else launch
            code = start(argv, folder, run, group["hosts"], log)
        on_hosts(group["hosts"], run_hosts.clear_command(run["id"]))
        if code == 0:
            break
    state = {"state": "ok" if code == 0 else "failed", "code": code, "hosts": group["hosts"], "attempt": attempt}
    write(place / "state.json", {**state, "started": begin, "ended": time.time()})


def launch(argv: list[str], folder: Path, run: dict[str, Any], hosts: list[str], log: IO[bytes]) -> int:
    return subprocess.call(
        argv, cwd=folder / "code", stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


def elastic(argv: list[str], folder: Path, run: dict[str, Any], hosts: list[str], log: IO[bytes]) -> int:
    """The same, while a file says which nodes the launcher can use."""
    known = run_agent.runtime(f"{run['id']}-launch") / "hosts"
    found = run_hosts.Hosts(folder, run, known, folder / "logs/hosts.jsonl")
    found.start(hosts)
    try:
        least = run["elastic"]["start"]
        if not found.wait(hosts, least, SECONDS_TO_START):
            log.write(f"{least} nodes must be ready for a start; {len(found.usable)} of {len(hosts)} are\n".encode())
            return 1
        return launch(argv, folder, run, hosts, log)
    finally:
        found.ended.set()


def main() -> None:
    folder = Path(sys.argv[1])
    run = json.loads((folder / "run.json").read_text())
    (run_agent.runtime(f"{run['id']}-launch") / "pid").write_text(str(os.getpid()))
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for point in run["points"]:
        waiting.put(point)

    def use(group: dict[str, Any]) -> None:
        while True:
            try:
                point = waiting.get_nowait()
            except queue.Empty:
                return
            carry_out(folder, run, point, group)

    threads = [threading.Thread(target=use, args=(group,)) for group in run["groups"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (folder / "complete").touch()
