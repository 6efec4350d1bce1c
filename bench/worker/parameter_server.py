"""A sharded parameter server: every process is a worker and also serves a share of the tensors.

A worker sends each gradient, as soon as it has it, to the one server that keeps that tensor and gets the sum back:
no ring, no fusion, as distributed TensorFlow had it. Tensors go to the server with the least to keep so far; a tensor
is never cut up, so a large one makes its server the slowest.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch

from bench.worker.engines import TorchEngine


class ParameterServerEngine(TorchEngine):
    def __init__(self) -> None:
        super().__init__()
        # Gradients and sums in groups of their own: the serving thread must not meet the worker's messages.
        self.push, self.pull = self.dist.new_group(backend="gloo"), self.dist.new_group(backend="gloo")
        self.kept = [0] * self.size
        self.owners: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        self.jobs: queue.Queue[tuple[int, torch.Tensor, threading.Event] | None] = queue.Queue()
        self.problem: BaseException | None = None
        self.own: list[threading.Event] = []
        self.others: list[tuple[Any, Any, torch.Tensor, torch.Tensor]] = []
        self.server = threading.Thread(target=self._serve, daemon=True)
        self.server.start()

    def begin(self, scale: float) -> None:
        self.own, self.others = [], []

    def owner(self, name: str, tensor: torch.Tensor) -> int:
        """All processes hand in the same tensors in the same order, so all come to the same answer."""
        if name not in self.owners:
            chosen = min(range(self.size), key=self.kept.__getitem__)
            self.kept[chosen] += tensor.numel()
            self.owners[name], self.numbers[name] = chosen, len(self.owners)
        return self.owners[name]

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        owner = self.owner(name, tensor)
        number = self.numbers[name]
        if owner == self.rank:
            done = threading.Event()
            self.own.append(done)
            self.jobs.put((number, tensor, done))
            return
        answer = torch.empty_like(tensor)
        sending = self.dist.isend(tensor, owner, group=self.push, tag=number)
        receiving = self.dist.irecv(answer, owner, group=self.pull, tag=number)
        self.others.append((sending, receiving, tensor, answer))

    def _serve(self) -> None:
        peers = [rank for rank in range(self.size) if rank != self.rank]
        while job := self.jobs.get():
            number, tensor, done = job
            try:
                parts = [torch.empty_like(tensor) for _ in peers]
                arriving = [
                    self.dist.irecv(part, peer, group=self.push, tag=number)
                    for part, peer in zip(parts, peers, strict=True)
                ]
                for work, part in zip(arriving, parts, strict=True):
                    work.wait()
                    tensor.add_(part)
                for work in [self.dist.isend(tensor, peer, group=self.pull, tag=number) for peer in peers]:
                    work.wait()
            except RuntimeError as error:
                self.problem = error
            done.set()

    def wait(self) -> None:
        for sending, receiving, tensor, answer in self.others:
            sending.wait()
            receiving.wait()
            tensor.copy_(answer)
        for done in self.own:
            done.wait()
        if self.problem:
            raise self.problem

    def close(self) -> None:
        """The serving thread ends first: one that the interpreter stops on its way out can take the process with it."""
        self.jobs.put(None)
        self.server.join()
        super().close()
