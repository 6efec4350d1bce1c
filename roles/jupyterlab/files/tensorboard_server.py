"""Start TensorBoard on the runs and results of the share: tensorboard_server.py PORT SHARE

It shows every event file that a script wrote into $RUN_OUTPUT, and the curves of sweeps (results/sweeps). A script
without TensorBoard's packages writes lines of JSON into metrics.jsonl instead; they become event files here.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

METRICS = ("runs/*/out/metrics.jsonl", "runs/*/*/out/metrics.jsonl", "results/*/metrics.jsonl")
OUTPUTS = ("runs/*/out", "runs/*/*/out")
PAUSE = 5


def values(line: bytes, number: int) -> tuple[int, dict[str, float]]:
    """The step and the finite numbers of a line. A line without a step is its own."""
    try:
        row = json.loads(line)
    except ValueError:
        return number, {}
    if not isinstance(row, dict):
        return number, {}
    found = {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and abs(value) < 1e300 and math.isfinite(value)
    }
    step = found.pop("step", number)
    return int(step) if abs(step) < 2**62 else number, found


class Metrics:
    """A metrics.jsonl that a script still writes, and the event file with its lines so far."""

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self.target = source, target
        self.at = self.number = self.times = 0

    def new_lines(self) -> Iterator[bytes]:
        """Complete lines since the last call. A file that became shorter is a new one."""
        with self.source.open("rb") as file:
            if file.seek(0, 2) < self.at:
                self.at = self.number = 0
                self.times += 1
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.at += len(line)
                self.number += 1
                yield line

    def update(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        lines = list(self.new_lines())
        if not lines:
            return
        self.target.mkdir(parents=True, exist_ok=True)
        moment = self.source.stat().st_mtime
        with (self.target / f"events.out.tfevents.{self.times}.metrics").open("ab") as file:
            writer = RecordWriter(file)
            if not file.tell():
                writer.write(Event(wall_time=moment, file_version="brain.Event:2").SerializeToString())
            for number, line in enumerate(lines, self.number - len(lines)):
                step, found = values(line, number)
                summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in found.items()])
                writer.write(Event(wall_time=moment, step=step, summary=summary).SerializeToString())


def name_of(folder: Path) -> Path:
    """runs/ID/out is shown as runs/ID."""
    return folder.parent if folder.name == "out" else folder


def update(share: Path, shown: Path, known: dict[Path, Metrics]) -> None:
    """Bring the folder that TensorBoard shows up to date."""
    for source in (path for pattern in METRICS for path in share.glob(pattern)):
        place = name_of(source.parent.relative_to(share))
        known.setdefault(source, Metrics(source, shown / "metrics" / place)).update()
    sweeps = {"sweeps": share / "results/sweeps"}
    outputs = {str(name_of(path.relative_to(share))): path for pattern in OUTPUTS for path in share.glob(pattern)}
    for name, folder in {**sweeps, **outputs}.items():
        link = shown / name
        # A run's link is inside a folder of its own: the points of a grid are in the run's folder too.
        link = link / "out" if name in outputs else link
        if folder.is_dir() and not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder)


def main() -> None:
    port, share = sys.argv[1], Path(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="tensorboard-") as folder:
        known: dict[Path, Metrics] = {}

        def follow() -> None:
            while True:
                try:
                    update(share, Path(folder), known)
                except (OSError, ValueError) as error:
                    # Such as a run's folder that somebody removes, or a name that is no text.
                    print(error, file=sys.stderr, flush=True)
                time.sleep(PAUSE)

        threading.Thread(target=follow, daemon=True).start()
        from tensorboard import main as tensorboard

        options = ["--logdir", folder, "--host", "127.0.0.1", "--port", port, "--reload_interval", str(PAUSE)]
        sys.argv = ["tensorboard", *options]
        tensorboard.run_main()


if __name__ == "__main__":
    main()
