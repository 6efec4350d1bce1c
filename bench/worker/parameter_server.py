"""A sharded parameter server: every process is a worker and also serves a share of the tensors.

A worker sends each gradient, as soon as it is ready, to the server that owns the tensor, and receives the sum: no ring,
no fusion, as in distributed TensorFlow. A new tensor goes to the server that owns the fewest elements. Tensors are not
split, so the owner of a large tensor is the slowest.
"""

import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.worker.engines import TorchEngine


@dataclass
class Request:
    """A sum that this process serves: its own gradient, and the receives of the others' with their targets."""

    tag: int
    tensor: torch.Tensor
    receives: list[tuple[Any, torch.Tensor]]
    sends: list[Any] = field(default_factory=list)
    summed: threading.Event = field(default_factory=threading.Event)


class ParameterServerEngine(TorchEngine):
    def __init__(self) -> None:
        super().__init__()
        # One group for gradients and one for sums: the serving thread must not receive the worker's messages.
        self.push, self.pull = self.dist.new_group(backend="gloo"), self.dist.new_group(backend="gloo")
        self.owned_elements = [0] * self.size
        self.owners: dict[str, int] = {}
        self.tags: dict[str, int] = {}
        self.requests: queue.Queue[Request | None] = queue.Queue()
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        self.error: BaseException | None = None
        self.local_sums: list[Request] = []
        self.remote_sums: list[tuple[Any, Any, torch.Tensor, torch.Tensor]] = []
        self.server = threading.Thread(target=self._serve, daemon=True)
        self.server.start()

    def begin(self, scale: float) -> None:
        self.local_sums, self.remote_sums = [], []

    def owner(self, name: str, tensor: torch.Tensor) -> int:
        """All processes submit the same tensors in the same order, so all choose the same owner."""
        if name not in self.owners:
            chosen = min(range(self.size), key=self.owned_elements.__getitem__)
            self.owned_elements[chosen] += tensor.numel()
            self.owners[name], self.tags[name] = chosen, len(self.owners)
        return self.owners[name]

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        owner = self.owner(name, tensor)
        tag = self.tags[name]
        if owner == self.rank:
            # At once: Gloo sends a message when its receiver is ready, and says so only then.
            parts = [torch.empty_like(tensor) for _ in self.peers]
            receives = [
                self.dist.irecv(part, peer, group=self.push, tag=tag)
                for part, peer in zip(parts, self.peers, strict=True)
            ]
            request = Request(tag, tensor, list(zip(receives, parts, strict=True)))
            self.local_sums.append(request)
            self.requests.put(request)
            return
        total = torch.empty_like(tensor)
        send = self.dist.isend(tensor, owner, group=self.push, tag=tag)
        receive = self.dist.irecv(total, owner, group=self.pull, tag=tag)
        self.remote_sums.append((send, receive, tensor, total))

    def _serve(self) -> None:
        while request := self.requests.get():
            tensor, tag = request.tensor, request.tag
            try:
                for work, part in request.receives:
                    work.wait()
                    tensor.add_(part)
                request.sends = [self.dist.isend(tensor, peer, group=self.pull, tag=tag) for peer in self.peers]
            except RuntimeError as error:
                self.error = error
            request.summed.set()

    def wait(self) -> None:
        for send, receive, tensor, total in self.remote_sums:
            send.wait()
            receive.wait()
            tensor.copy_(total)
        for request in self.local_sums:
            request.summed.wait()
            for work in request.sends:
                work.wait()
        if self.error:
            raise self.error

    def close(self) -> None:
        """End the serving thread first: a thread that runs at interpreter exit can crash the process."""
        self.requests.put(None)
        self.server.join()
        super().close()
