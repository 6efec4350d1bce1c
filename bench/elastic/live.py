"""An elastic run that goes on: its trace so far, and waiting for something to show in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bench.elastic import trace
from bench.elastic.trace import Row
from bench.run import nodes
from cluster.core import files, ssh
from cluster.core.contract import Contract
from cluster.core.errors import InfraError

T = TypeVar("T")
PAUSE = 2.0
# Of each process. A step of the example takes a tenth of a second or more.
LAST_STEPS = 1500


@dataclass(frozen=True)
class Live:
    contract: Contract
    run: str

    def rows(self, lines: str = str(LAST_STEPS)) -> list[Row]:
        """The last steps of each process; with +1, all of them."""
        folder = f"{nodes.share_folder(self.contract, self.run)}/out"
        show = f'cd {folder} && for f in trace-*.jsonl; do tail -n {lines} "$f" 2>/dev/null | sed "s/^/$f:/"; done'
        return trace.parse(self.on_head(show))

    def on_head(self, command: str) -> str:
        head = self.contract.head
        argv = ssh.as_training_account(self.contract, head, ["sh", "-c", command])
        done = ssh.gather({head: argv})[head]
        if done.returncode:
            raise InfraError(f"node {head}: {command}: {done.stderr.strip() or 'failed'}")
        return done.stdout

    def now(self) -> float:
        """The head's clock, which the nodes' clocks follow."""
        return files.answer(self.on_head("date +%s.%N"), f"node {self.contract.head}", float)

    def going(self) -> bool:
        folder = f"/run/run-{self.run}-launch"
        return self.on_head(f"ls -d {folder} 2>/dev/null || true").strip() == folder

    def wait(self, what: str, found: Callable[[list[Row]], T | None], seconds: float) -> T:
        """Look at the trace until it shows something."""
        deadline = time.monotonic() + seconds
        while (result := found(self.rows())) is None:
            if not self.going():
                raise InfraError(f"run {self.run}: it ended before {what}; see `bench runs logs {self.run}`")
            if time.monotonic() > deadline:
                raise InfraError(f"run {self.run}: {what}: not within {seconds:.0f} s")
            time.sleep(PAUSE)
        return result

    def wait_for_size(self, size: int, seconds: float, after: float = 0.0, window: float = trace.WINDOW) -> list[Row]:
        """Wait until so many processes have made steps for a while, and return the trace."""

        def steady(rows: list[Row]) -> list[Row] | None:
            recent = [row for row in rows if row.time >= rows[-1].time - window]
            sized = {row.size for row in recent} == {size} and rows[-1].time - rows[0].time >= window
            fresh = rows and self.now() - rows[-1].time < window and recent[0].time > after
            return rows if sized and fresh else None

        return self.wait(f"{size} processes", lambda rows: steady(rows) if rows else None, seconds)


def place_of_rank(rows: list[Row], rank: int) -> str:
    """The node of this rank in the last step."""
    return next(row.place for row in reversed(rows) if row.rank == rank).rpartition(".")[0]
