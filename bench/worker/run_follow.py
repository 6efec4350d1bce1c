"""Print the output of a run on the head until it ends. With --own, the run ends when standard input closes."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from bench.worker import run_agent

PAUSE = 0.2


class Tail:
    """The lines that a file gains."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.path, self.prefix, self.at, self.rest = path, prefix, 0, b""

    def show(self, last: bool = False) -> None:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.at)
            data = file.read()
            self.at += len(data)
            *lines, self.rest = (self.rest + data).split(b"\n")
            if last and self.rest:
                lines, self.rest = [*lines, self.rest], b""
            for line in lines:
                sys.stdout.buffer.write(self.prefix.encode() + line + b"\n")


def end(run: str) -> None:
    with suppress(OSError, ValueError):
        os.kill(int((run_agent.runtime(f"{run}-launch") / "pid").read_text()), signal.SIGTERM)


def watch(run: str) -> None:
    while os.read(0, 1024):
        pass
    end(run)


def main() -> None:
    folder, options = Path(sys.argv[1]), sys.argv[2:]
    # Of an elastic run, rank 0 may be on any node.
    every = "--all" in options or bool(json.loads((folder / "run.json").read_text()).get("elastic"))
    if "--own" in options:
        threading.Thread(target=watch, args=(folder.name,), daemon=True).start()
    tails: dict[Path, Tail] = {}
    ended = False
    while True:
        pattern = "**/logs/rank-*.log" if every else "**/logs/rank-0.log"
        for path in sorted(path for path in folder.glob(pattern) if folder / "code" not in path.parents):
            where = path.parent.parent.relative_to(folder)
            point = "" if str(where) == "." else f"{where} "
            prefix = f"[{point}{path.stem.removeprefix('rank-')}] " if every or point else ""
            tails.setdefault(path, Tail(path, prefix)).show(last=ended)
        sys.stdout.flush()
        unit = run_agent.runtime(f"{folder.name}-launch")
        if ended or "--no-wait" in options:
            break
        ended = (folder / "end.json").exists() or not unit.exists()
        time.sleep(PAUSE)
    sys.stdout.flush()
    os._exit(0)
