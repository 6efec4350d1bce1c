"""An emulated rank of a network that is split: runs the program of its step, with real bytes between the ranks.

The program comes with the trial (bench/plan/programs.py). Compute sleeps. What a rank receives is posted when the step
begins, as on GPUs, whose receives wait in the queue of a stream: a transfer then overlaps with compute.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.worker.engines import Engine, GradientSum, SplitEngine
from bench.worker.node_link import sleep_until
from bench.worker.protocol import Operation, SplitSpec, Step, TrialSpec


@dataclass(frozen=True)
class Content:
    """What a buffer must hold after a step, at one of its elements."""

    what: str
    buffer: torch.Tensor
    element: int
    expected: float


class EmulatedSplit:
    precision: str | None = None

    def __init__(self, trial: TrialSpec, split: SplitSpec, engine: SplitEngine) -> None:
        self.dist, self.rank = engine.dist, engine.rank
        self.scale, self.slowdown = trial.scale, trial.slowdown
        self.groups = [(len(ranks), group_of(engine, ranks)) for ranks in split.groups]
        self.losses: list[float] = []
        self.contents: list[Content] = []
        self.receives: list[Callable[[], Any]] = []
        self.actions = [self._action(one) for one in split.programs[engine.rank]]

    def step(self, engine: GradientSum) -> Step:
        begin = time.perf_counter()
        self.started: list[Any] = []
        self.sends: list[Any] = []
        self.computed = 0.0
        self.first: float | None = None
        self.expected = [receive() for receive in self.receives]
        self.received = 0
        for action in self.actions:
            action()
        end = time.perf_counter()
        communication = end - self.first if self.first is not None else 0.0
        return Step(*(seconds / self.slowdown for seconds in (end - begin, self.computed, communication, 0.0)))

    def check(self, engine: Engine) -> None:
        for one in self.contents:
            if float(one.buffer[one.element]) != one.expected:
                found = float(one.buffer[one.element])
                raise RuntimeError(f"{one.what} yielded {found} instead of {one.expected} on rank {engine.rank}")

    def _action(self, one: Operation) -> Callable[[], None]:
        count = max(1, round(one.value / self.scale))
        match one.kind:
            case "compute":
                return lambda: self._compute(one.value / 1000 * self.slowdown)
            case "wait":
                return lambda: self._wait(one.at)
            case "finish":
                return self._finish
            case "send":
                return self._send(count, one.at)
            case "receive":
                return self._receive(count, one.at)
        return self._collective(one.kind, count, *self.groups[one.at])

    def _compute(self, seconds: float) -> None:
        begin = time.perf_counter()
        sleep_until(begin + seconds)
        self.computed += time.perf_counter() - begin

    def _wait(self, number: int) -> None:
        if self.started[number] is not None:
            self.started[number].wait()

    def _finish(self) -> None:
        for work in (*self.started, *self.sends):
            if work is not None:
                work.wait()

    def _begin(self, start: Callable[[], Any]) -> Any:
        if self.first is None:
            self.first = time.perf_counter()
        return start()

    def _collective(self, kind: str, count: int, size: int, group: Any) -> Callable[[], None]:
        if size == 1:
            return lambda: self.started.append(None)
        share = -(-count // size)
        mine, every = torch.ones(share), torch.ones(size * share)
        if kind == "gather":
            self.contents.append(Content("a gather", every, -1, 1.0))
            shares = list(every.chunk(size))
            return self._start(lambda: self.dist.all_gather(shares, mine, group=group, async_op=True))
        if kind == "scatter":
            # Each rank sends every other one its part of the sum: the bytes of a ring. Gloo's own sends more.
            parts = torch.empty_like(every)
            self.contents.append(Content("a scatter", parts, -1, 1.0))
            return self._start(lambda: self.dist.all_to_all_single(parts, every, group=group, async_op=True))
        total = torch.ones(count)
        self.contents.append(Content("a sum", total, -1, float(size)))
        return self._start(lambda: self.dist.all_reduce(total.fill_(1.0), group=group, async_op=True))

    def _start(self, collective: Callable[[], Any]) -> Callable[[], None]:
        return lambda: self.started.append(self._begin(collective))

    def _send(self, count: int, peer: int) -> Callable[[], None]:
        buffer = torch.full((count,), float(self.rank + 1))
        return lambda: self.sends.append(self._begin(lambda: self.dist.isend(buffer, peer)))

    def _receive(self, count: int, peer: int) -> Callable[[], None]:
        buffer = torch.empty(count)
        self.contents.append(Content(f"a message from rank {peer}", buffer, -1, float(peer + 1)))
        self.receives.append(lambda: self.dist.irecv(buffer, peer))

        def wait() -> None:
            self.expected[self.received].wait()
            self.received += 1

        return wait


def group_of(engine: SplitEngine, ranks: list[int]) -> Any:
    """All ranks create the same groups in the same order, each once per launch."""
    if len(ranks) == engine.size:
        return None
    key = tuple(ranks)
    if key not in engine.groups:
        engine.groups[key] = engine.dist.new_group(ranks, backend="gloo")
    return engine.groups[key]
