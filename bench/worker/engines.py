"""The ways to add up gradients over all processes. Each takes tensors as they become ready, then waits for all."""

from __future__ import annotations

import os
import pickle
import time
from typing import Any, Protocol

import torch

DDP_FIRST_BUCKET = 1 << 20
DDP_BUCKET = 25 << 20
# Between two looks whether a collective is done: a tenth of what it has taken so far, within these.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0001, 0.001


class GradientSum(Protocol):
    """Adds gradients up over all ranks: begin a step, submit each tensor when it is ready, wait for the sums."""

    rank: int
    size: int
    local_rank: int

    def begin(self, scale: float) -> None: ...
    def submit(self, name: str, tensor: torch.Tensor) -> None: ...
    def wait(self) -> None: ...


class Engine(GradientSum, Protocol):
    """With what ranks need besides: objects for all, single collectives, an end."""

    def barrier(self) -> None: ...
    def broadcast(self, value: Any) -> Any: ...
    def gather(self, value: Any) -> list[Any]: ...
    def all_reduce(self, name: str, tensor: torch.Tensor) -> torch.Tensor: ...
    def broadcast_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor: ...
    def all_gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor: ...
    def reduce_scatter(self, name: str, tensor: torch.Tensor) -> torch.Tensor: ...
    def all_to_all(self, name: str, tensor: torch.Tensor) -> torch.Tensor: ...
    def close(self) -> None: ...


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

    def submit_bytes(self, name: str, payload: torch.Tensor) -> None:
        self.handles.append(self.hvd.allgather_async(payload, name=name))

    def wait_bytes(self) -> list[torch.Tensor]:
        """Of each tensor in turn, all ranks' bytes one after the other."""
        return [self._done(handle) for handle in self.handles]

    def _done(self, handle: int) -> torch.Tensor:
        """Horovod's own wait looks every 100 ns: a third of a core per rank, and nodes here share two."""
        begin = time.perf_counter()
        while not self.hvd.poll(handle):
            time.sleep(min(max((time.perf_counter() - begin) / 10, SHORTEST_PAUSE), LONGEST_PAUSE))
        return self.hvd.synchronize(handle)

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        self.handles.append(self.hvd.allreduce_async_(tensor, name=name, op=self.hvd.Sum))

    def wait(self) -> None:
        for handle in self.handles:
            self._done(handle)

    def barrier(self) -> None:
        self._done(self.hvd.allreduce_async(torch.zeros(1), name="barrier"))

    def broadcast(self, value: Any) -> Any:
        return self.gather(value if self.rank == 0 else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Horovod's own for objects waits in Horovod's way, which takes the cores from ranks that still work."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._done(self.hvd.allgather_async(torch.tensor([mine.numel()]), name="sizes"))
        found = self._done(self.hvd.allgather_async(mine, name="objects"))
        return [pickle.loads(one.numpy().tobytes()) for one in found.split(sizes.tolist())]  # noqa: S301

    def all_reduce(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._done(self.hvd.allreduce_async_(tensor, name=name, op=self.hvd.Sum))

    def broadcast_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.hvd.broadcast_(tensor, 0, name=name)

    def all_gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.hvd.allgather(tensor, name=name)

    def reduce_scatter(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.hvd.reducescatter(tensor, name=name, op=self.hvd.Sum)

    def all_to_all(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.hvd.alltoall(tensor, name=name)

    def close(self) -> None:
        self.hvd.shutdown()


class TorchEngine:
    """torch.distributed over Gloo, started by mpirun or by torchrun."""

    def __init__(self) -> None:
        import torch.distributed as dist

        launched = os.environ
        self.rank = int(launched.get("RANK", launched.get("OMPI_COMM_WORLD_RANK", "0")))
        self.size = int(launched.get("WORLD_SIZE", launched.get("OMPI_COMM_WORLD_SIZE", "1")))
        self.local_rank = int(launched.get("LOCAL_RANK", launched.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")))
        dist.init_process_group("gloo", rank=self.rank, world_size=self.size)
        self.dist = dist

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

    def all_reduce(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.dist.all_reduce(tensor)
        return tensor

    def broadcast_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.dist.broadcast(tensor, src=0)
        return tensor

    def all_gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        found = torch.empty(tensor.numel() * self.size)
        self.dist.all_gather(list(found.chunk(self.size)), tensor)
        return found

    def reduce_scatter(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        found = torch.empty(tensor.numel() // self.size)
        self.dist.reduce_scatter(found, list(tensor[: found.numel() * self.size].chunk(self.size)))
        return found

    def all_to_all(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        found = torch.empty_like(tensor)
        self.dist.all_to_all_single(found, tensor)
        return found

    def close(self) -> None:
        self.dist.destroy_process_group()


class DdpEngine(TorchEngine):
    """With DistributedDataParallel's buckets: 1 MB first, then 25 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(1.0)

    def begin(self, scale: float) -> None:
        self.bucket: list[torch.Tensor] = []
        self.pending: list[tuple[Any, torch.Tensor, list[torch.Tensor]]] = []
        self.scale, self.first = scale, True

    def _full(self, share: float) -> bool:
        limit = (DDP_FIRST_BUCKET if self.first else DDP_BUCKET) / self.scale * share
        return bool(sum(one.numel() * one.element_size() for one in self.bucket) >= limit)

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        self.bucket.append(tensor)
        if self._full(1.0):
            self._sum_bucket()

    def _sum_bucket(self) -> None:
        flat = torch.cat([one.flatten() for one in self.bucket])
        self.pending.append((self.dist.all_reduce(flat, async_op=True), flat, self.bucket))
        self.bucket, self.first = [], False

    def wait(self) -> None:
        if self.bucket:
            self._sum_bucket()
        for work, flat, tensors in self.pending:
            work.wait()
            for tensor, part in zip(tensors, flat.split([one.numel() for one in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def submit_bytes(self, name: str, payload: torch.Tensor) -> None:
        """Buckets of as many elements as uncompressed ones hold: a bit each instead of 32."""
        self.bucket.append(payload)
        if self._full(1 / 32):
            self._gather_bucket()

    def _gather_bucket(self) -> None:
        flat = torch.cat(self.bucket)
        found = torch.empty(flat.numel() * self.size, dtype=flat.dtype)
        self.pending.append(
            (self.dist.all_gather(list(found.chunk(self.size)), flat, async_op=True), found, self.bucket)
        )
        self.bucket, self.first = [], False

    def wait_bytes(self) -> list[torch.Tensor]:
        """Of each tensor in turn, all ranks' bytes one after the other."""
        if self.bucket:
            self._gather_bucket()
        results = []
        for work, found, payloads in self.pending:
            work.wait()
            ranks = [part.split([one.numel() for one in payloads]) for part in found.chunk(self.size)]
            results += [torch.cat(parts) for parts in zip(*ranks, strict=True)]
        return results


def make(name: str) -> Engine:
    if name == "ddp":
        return DdpEngine()
    if name == "ps":
        from bench.worker.parameter_server import ParameterServerEngine

        return ParameterServerEngine()
    return HorovodEngine()
