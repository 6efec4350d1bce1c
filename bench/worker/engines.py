"""The ways to add up gradients over all processes. Each takes tensors as they become ready, then waits for all."""

from __future__ import annotations

import os
from typing import Any

import torch

DDP_FIRST_BUCKET = 1 << 20
DDP_BUCKET = 25 << 20


class HorovodEngine:
    """Horovod; MPI or Gloo is decided by how the processes were started."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.hvd = hvd
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
        self.handles: list[int] = []

    def begin(self, scale: float) -> None:
        self.handles = []

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        self.handles.append(self.hvd.allreduce_async_(tensor, name=name, op=self.hvd.Sum))

    def wait(self) -> None:
        for handle in self.handles:
            self.hvd.synchronize(handle)

    def barrier(self) -> None:
        self.hvd.allreduce(torch.zeros(1), name="barrier")

    def broadcast(self, value: Any) -> Any:
        return self.hvd.broadcast_object(value, root_rank=0)

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = self.hvd.allgather_object(value)
        return found

    def close(self) -> None:
        self.hvd.shutdown()


class DdpEngine:
    """torch.distributed over Gloo with DistributedDataParallel's buckets: 1 MB first, then 25 MB."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self.rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        self.size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
        self.local_rank = int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
        dist.init_process_group("gloo", rank=self.rank, world_size=self.size)
        self.dist = dist
        self.bucket: list[torch.Tensor] = []
        self.pending: list[Any] = []
        self.scale = 1.0
        self.first = True

    def begin(self, scale: float) -> None:
        self.bucket, self.pending, self.scale, self.first = [], [], scale, True

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        self.bucket.append(tensor)
        limit = (DDP_FIRST_BUCKET if self.first else DDP_BUCKET) / self.scale
        if sum(one.numel() * one.element_size() for one in self.bucket) >= limit:
            self._flush()

    def _flush(self) -> None:
        flat = torch.cat([one.flatten() for one in self.bucket])
        self.pending.append((self.dist.all_reduce(flat, async_op=True), flat, self.bucket))
        self.bucket, self.first = [], False

    def wait(self) -> None:
        if self.bucket:
            self._flush()
        for work, flat, tensors in self.pending:
            work.wait()
            for tensor, part in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def barrier(self) -> None:
        self.dist.barrier()

    def broadcast(self, value: Any) -> Any:
        box = [value]
        self.dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        self.dist.all_gather_object(found, value)
        return found

    def close(self) -> None:
        self.dist.destroy_process_group()


def make(name: str) -> HorovodEngine | DdpEngine:
    return DdpEngine() if name == "ddp" else HorovodEngine()
