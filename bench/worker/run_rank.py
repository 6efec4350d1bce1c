"""A rank as its launcher sees it: hand the rank to this node's run_agent.py, and end with its exit code."""

import json
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

from bench.worker import fabric, run_agent

# What each launcher calls rank, size, rank and ranks on the node. torchrun is first: mpirun starts it.
NAMES = {
    "TORCHELASTIC_RUN_ID": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "HOROVOD_RANK": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "OMPI_COMM_WORLD_RANK": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
}


def ranks(environment: dict[str, str]) -> dict[str, str]:
    """RANK and the others, whichever launcher started this process."""
    names = next((names for mark, names in NAMES.items() if mark in environment), NAMES["TORCHELASTIC_RUN_ID"])
    defaults = ("0", "1", "0", "1")
    wanted = NAMES["TORCHELASTIC_RUN_ID"]
    return {new: environment.get(old, value) for new, old, value in zip(wanted, names, defaults, strict=True)}


def request(folder: Path, point: str, environment: dict[str, str]) -> dict[str, object]:
    """What the agent needs to start this rank."""
    run = json.loads((folder / "run.json").read_text())
    chosen = next(one for one in run["points"] if one["name"] == point)
    place = folder / point
    found = ranks(environment)
    values = (
        environment
        | found
        | {
            "PATH": ":".join([*run["path"], environment.get("PATH", os.defpath)]),
            "RUN_ID": run["id"],
            "RUN_OUTPUT": str(place / "out"),
            "RUN_DATA": run["data"],
            "PYTHONUNBUFFERED": "1",
        }
    )
    name = found["RANK"]
    if run.get("elastic"):
        # Ranks change hands when nodes come and go; a place on a node does not.
        name = f"{os.uname().nodename}.{found['LOCAL_RANK']}"
    log = place / "logs" / f"rank-{name}.log"
    words = [*run["container"], *chosen["words"]]
    return {
        "rank": int(found["RANK"]),
        "words": words,
        "environment": values,
        "folder": str(folder / "code"),
        "log": str(log),
    }


def end_with_launcher() -> None:
    """End when nobody reads our output: the launcher's SSH connection is gone, and no signal says so."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    while not output.poll(60_000):
        pass
    os._exit(1)


def main() -> None:
    folder, point = Path(sys.argv[1]), sys.argv[2]
    # A launcher ends ranks by a signal; the connection closes with this process, and the agent ends the rank.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    fabric.use()
    threading.Thread(target=end_with_launcher, daemon=True).start()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(run_agent.runtime(folder.name) / "socket"))
        connection.sendall(json.dumps(request(folder, point, dict(os.environ))).encode() + b"\n")
        answer = connection.makefile().readline().strip()
    code = int(answer or 1)
    sys.exit(128 - code if code < 0 else code)
