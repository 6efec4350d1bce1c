"""Start a run's ranks on this node, inside the run's systemd unit, so that nothing of a run can outlive it.

A launcher starts run_rank.py, by SSH on most nodes: outside any unit of ours. That program connects to this one,
which starts the rank as its own child. Whatever a rank starts, in a session of its own or not, stays in the unit's
control group, and systemd ends all of it when this process ends. No privilege is needed while a run goes on.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.worker import run_drain

SECONDS_TO_END = 3.0


def runtime(run: str) -> Path:
    """systemd makes this folder for the unit, mode 0700, and removes it with the unit."""
    return Path(f"/run/run-{run}")


def variables(run: str) -> dict[str, str]:
    """The variables of --env. Their file is in memory and goes with the unit."""
    try:
        found: dict[str, str] = json.loads((runtime(run) / "variables").read_text() or "{}")
    except FileNotFoundError:
        return {}
    return found


def own_group() -> set[int]:
    """The processes in our control group. Systems have one hierarchy, or several, of which systemd uses one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd"):
            found = {
                int(entry.parent.name)
                for entry in Path("/proc").glob("[0-9]*/cgroup")
                if line_in(entry, f":{controllers}:{path}")
            }
            if found and path != "/":
                return found
    return set()


def line_in(file: Path, wanted: str) -> bool:
    with suppress(OSError):
        return any(line.endswith(wanted) for line in file.read_text().splitlines())
    return False


def clear(run: str) -> None:
    """End every process of the run on this node but this one: between two attempts, and between points of a grid."""
    listed = subprocess.run(["sh", "-c", f"podman ps -aq --filter label=run={run}"], capture_output=True, text=True)
    for container in listed.stdout.split():
        subprocess.run(["podman", "rm", "--force", "--time", "0", container], capture_output=True, check=False)
    deadline = time.monotonic() + 10
    while (others := own_group() - {os.getpid()}) and time.monotonic() < deadline:
        for pid in others:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def serve(connection: socket.socket, run: str) -> None:
    """Start one rank and answer with its exit code. A connection that closes ends the rank."""
    with connection, connection.makefile("r") as lines:
        request: dict[str, Any] = json.loads(lines.readline())
        if request.get("clear"):
            clear(run)
            connection.sendall(b"0\n")
            return
        log = Path(request["log"])
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = request["environment"] | variables(run)
        begin = time.time()
        with log.open("ab") as out:
            try:
                process = subprocess.Popen(
                    request["words"],
                    cwd=request["folder"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                out.write(f"{request['words'][0]}: {error.strerror}\n".encode())
                process = None
        stopped = threading.Event()
        if process:
            threading.Thread(target=end_with, args=(lines, process, stopped), daemon=True).start()
        code = process.wait() if process else 127
        record = {"rank": request["rank"], "node": socket.gethostname(), "code": code, "stopped": stopped.is_set()}
        record |= {"started": begin, "ended": time.time()}
        temporary = log.with_suffix(".tmp")
        temporary.write_text(json.dumps(record))
        temporary.replace(log.with_suffix(".json"))
        with suppress(OSError):
            connection.sendall(f"{code}\n".encode())


def end_with(lines: Any, process: "subprocess.Popen[bytes]", stopped: threading.Event) -> None:
    """Wait until the launcher ends run_rank.py; then end the rank."""
    with suppress(OSError, ValueError):
        lines.readline()
    if process.poll() is not None:
        return
    stopped.set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
            return


def end_with_run(folder: Path) -> None:
    """End when the run has ended: a node that hung or was away meanwhile was not told."""
    while not (folder / "end.json").exists():
        time.sleep(5)
    os._exit(0)


def watch_run(folder: Path) -> None:
    """Of an elastic run, which goes on when a node leaves it."""
    tasks: list[tuple[Any, ...]] = [(end_with_run, folder)]
    if json.loads((folder / "run.json").read_text())["provider"] == "aws":
        tasks.append((run_drain.watch, folder, os.uname().nodename))
    for target, *args in tasks:
        threading.Thread(target=target, args=args, daemon=True).start()


def main() -> None:
    run = sys.argv[1]
    if len(sys.argv) > 2:
        watch_run(Path(sys.argv[2]))
    # A service starts with a low soft limit, a login with the hard one.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    folder = runtime(run)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        server.listen(1024)
        # run_end.py ends this process by it.
        (folder / "pid").write_text(str(os.getpid()))
        if "NOTIFY_SOCKET" in os.environ:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
                notify.connect(os.environ.pop("NOTIFY_SOCKET").replace("@", "\0"))
                notify.send(b"READY=1")
        while True:
            connection, _ = server.accept()
            threading.Thread(target=serve, args=(connection, run), daemon=True).start()
