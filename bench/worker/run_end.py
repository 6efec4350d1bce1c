"""What follows every run on the head, however it ended: end its units on all nodes, then record the end."""

import json
import sys
import time
from pathlib import Path

from bench.worker import run_launch


def main() -> None:
    folder = Path(sys.argv[1])
    run = json.loads((folder / "run.json").read_text())
    # systemd then ends everything in the unit's control group, and removes the file with the variables.
    pid = f"/run/run-{run['id']}/pid"
    hosts = [host for group in run["groups"] for host in group["hosts"]]
    wait = f"for i in $(seq 100); do [ -e {pid} ] || break; sleep 0.1; done"
    # A container that ended with the unit stays in podman's storage, with the variables.
    remove = f"; podman ps -aq --filter label=run={run['id']} | xargs -r podman rm -f -t 0" if run["image"] else ""
    run_launch.on_hosts(hosts, f"kill -9 $(cat {pid}); {wait}{remove}")
    states = [state_of(folder / point["name"]) for point in run["points"]]
    complete = (folder / "complete").exists()
    ok = complete and all(state == "ok" for state in states)
    state = "ok" if ok else "failed" if complete else "cancelled"
    run_launch.write(folder / "end.json", {"state": state, "ended": time.time(), "points": states})


def state_of(place: Path) -> str:
    try:
        state: str = json.loads((place / "state.json").read_text())["state"]
    except FileNotFoundError:
        return "not started"
    return "cancelled" if state == "running" else state
