"""Engines that sum gradients over all ranks. Each accepts tensors as they become ready, then waits for all sums."""

import inspect
import os
import pickle
import time
from typing import Any, Protocol

import torch
from torch import nn

DDP_FIRST_BUCKET = 1 << 20
DDP_BUCKET = 25 << 20
# Seconds between two polls of a collective: a tenth of its time so far, within these limits.
MIN_PAUSE, MAX_PAUSE = 0.0001, 0.001


class GradientSum(Protocol):
    """Sums gradients over all ranks: begin a step, submit each tensor when it is ready, wait for the sums."""

    rank: int
    size: int
    local_rank: int
    in_backward: bool  # the model itself averages its gradients during backward: nothing to submit
    holds_weights: bool  # updates are submitted, and the engine changes the weights (weights.py)

    def begin(self, scale: float) -> None: ...
    def submit(self, name: str, tensor: torch.Tensor) -> None: ...
    def wait(self) -> None: ...


class Engine(GradientSum, Protocol):
    """A gradient sum with object exchange, single collectives and shutdown."""

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
    """Horovod over MPI or Gloo; the launcher selects which. On GPUs it sends over NCCL."""

    in_backward = holds_weights = False

    def __init__(self, cuda: bool = False) -> None:
        import horovod.torch as hvd

        if cuda:
            # A handle must be done when the sum is there, not when NCCL has queued it: the sum's time is measured.
            os.environ["HOROVOD_ENABLE_ASYNC_COMPLETION"] = "0"
        hvd.init()
        self.hvd, self.cuda = hvd, cuda
        self.rank, self.size, self.local_rank = hvd.rank(), hvd.size(), hvd.local_rank()
        self.handles: list[int] = []

    def begin(self, scale: float) -> None:
        self.handles = []

    def submit_bytes(self, name: str, payload: torch.Tensor) -> None:
        self.handles.append(self.hvd.allgather_async(payload, name=name))

    def wait_bytes(self) -> list[torch.Tensor]:
        """Per submitted payload, the bytes of all ranks in rank order."""
        return [self._wait_for(handle) for handle in self.handles]

    def _wait_for(self, handle: int) -> torch.Tensor:
        """Wait with longer pauses than Horovod, which polls every 100 ns and so takes a third of a core per rank.

        A rank with a GPU has cores to itself, and a pause would add to its step.
        """
        begin = time.perf_counter()
        while not self.cuda and not self.hvd.poll(handle):
            time.sleep(min(max((time.perf_counter() - begin) / 10, MIN_PAUSE), MAX_PAUSE))
        return self.hvd.synchronize(handle)

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        # Like Horovod's optimiser, a single rank sends nothing: the step would wait for Horovod's cycle.
        if self.size > 1:
            self.handles.append(self.hvd.allreduce_async_(tensor, name=name, op=self.hvd.Sum))

    def wait(self) -> None:
        for handle in self.handles:
            self._wait_for(handle)

    def barrier(self) -> None:
        self._wait_for(self.hvd.allreduce_async(torch.zeros(1), name="barrier"))

    def broadcast(self, value: Any) -> Any:
        """Not by gather: a ring would hand a model's weights from rank to rank."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value if self.rank == 0 else None)), dtype=torch.uint8)
        size = self._wait_for(self.hvd.broadcast_async(torch.tensor([mine.numel()]), 0, name="size"))
        content = mine if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        received = self._wait_for(self.hvd.broadcast_async_(content, 0, name="object"))
        return pickle.loads(received.numpy())  # noqa: S301

    def gather(self, value: Any) -> list[Any]:
        """Not hvd.allgather_object: its wait takes CPU time from ranks that still compute."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._wait_for(self.hvd.allgather_async(torch.tensor([mine.numel()]), name="sizes"))
        gathered = self._wait_for(self.hvd.allgather_async(mine, name="objects"))
        return [pickle.loads(part.numpy().tobytes()) for part in gathered.split(sizes.tolist())]  # noqa: S301

    def all_reduce(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._wait_for(self.hvd.allreduce_async_(tensor, name=name, op=self.hvd.Sum))

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
    """torch.distributed, started by mpirun or by torchrun. Objects and barriers go over Gloo."""

    in_backward = holds_weights = False

    def __init__(self, backend: str = "gloo") -> None:
        import torch.distributed as dist

        env = os.environ
        self.rank = int(env.get("RANK", env.get("OMPI_COMM_WORLD_RANK", "0")))
        self.size = int(env.get("WORLD_SIZE", env.get("OMPI_COMM_WORLD_SIZE", "1")))
        self.local_rank = int(env.get("LOCAL_RANK", env.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")))
        dist.init_process_group(backend, rank=self.rank, world_size=self.size)
        self.dist = dist

    def barrier(self) -> None:
        self.dist.barrier()

    def broadcast(self, value: Any) -> Any:
        box = [value]
        self.dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self.dist.all_gather_object(values, value)
        return values

    def all_reduce(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.dist.all_reduce(tensor)
        return tensor

    def broadcast_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.dist.broadcast(tensor, src=0)
        return tensor

    def all_gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        output = torch.empty(tensor.numel() * self.size)
        self.dist.all_gather(list(output.chunk(self.size)), tensor)
        return output

    def reduce_scatter(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        output = torch.empty(tensor.numel() // self.size)
        self.dist.reduce_scatter(output, list(tensor[: output.numel() * self.size].chunk(self.size)))
        return output

    def all_to_all(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(tensor)
        self.dist.all_to_all_single(output, tensor)
        return output

    def close(self) -> None:
        self.dist.destroy_process_group()


class DdpEngine(TorchEngine):
    """Sums in the buckets of DistributedDataParallel: 1 MiB first, then 25 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(1.0)

    def begin(self, scale: float) -> None:
        self.bucket: list[torch.Tensor] = []
        self.pending: list[tuple[Any, torch.Tensor, list[torch.Tensor]]] = []
        self.scale, self.first = scale, True

    def _add(self, tensor: torch.Tensor, share: float) -> bool:
        """Add a tensor to the bucket; whether the bucket is full."""
        self.bucket.append(tensor)
        limit = (DDP_FIRST_BUCKET if self.first else DDP_BUCKET) / self.scale * share
        return bool(sum(tensor.numel() * tensor.element_size() for tensor in self.bucket) >= limit)

    def submit(self, name: str, tensor: torch.Tensor) -> None:
        if self._add(tensor, 1.0):
            self._sum_bucket()

    def _sum_bucket(self) -> None:
        flat = torch.cat([tensor.flatten() for tensor in self.bucket])
        self.pending.append((self.dist.all_reduce(flat, async_op=True), flat, self.bucket))
        self.bucket, self.first = [], False

    def wait(self) -> None:
        if self.bucket:
            self._sum_bucket()
        for work, flat, tensors in self.pending:
            work.wait()
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def submit_bytes(self, name: str, payload: torch.Tensor) -> None:
        """A bucket holds as many elements as an uncompressed one, at 1 bit each instead of 32."""
        if self._add(payload, 1 / 32):
            self._gather_bucket()

    def _gather_bucket(self) -> None:
        flat = torch.cat(self.bucket)
        output = torch.empty(flat.numel() * self.size, dtype=flat.dtype)
        work = self.dist.all_gather(list(output.chunk(self.size)), flat, async_op=True)
        self.pending.append((work, output, self.bucket))
        self.bucket, self.first = [], False

    def wait_bytes(self) -> list[torch.Tensor]:
        """Per submitted payload, the bytes of all ranks in rank order."""
        if self.bucket:
            self._gather_bucket()
        results = []
        for work, output, payloads in self.pending:
            work.wait()
            ranks = [part.split([payload.numel() for payload in payloads]) for part in output.chunk(self.size)]
            results += [torch.cat(parts) for parts in zip(*ranks, strict=True)]
        return results


class ModuleEngine(TorchEngine):
    """torch's own DistributedDataParallel: on NCCL for GPUs."""

    in_backward = True

    def begin(self, scale: float) -> None: ...
    def submit(self, name: str, tensor: torch.Tensor) -> None: ...
    def wait(self) -> None: ...

    def module(self, model: nn.Module, half: bool) -> nn.Module:
        """Without its broadcast of buffers before each forward: Horovod sends gradients only, too."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        place = next(model.parameters()).device
        devices = [place] if place.type == "cuda" else None
        # torch before 2.13, which older GPUs need, has another name for it.
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        module = nn.parallel.DistributedDataParallel(model, device_ids=devices, **{name: False})
        if half:
            module.register_comm_hook(None, fp16_compress_hook)
        return module


class SplitEngine(ModuleEngine):
    """torch's own communication for a network that is split over ranks: see split_devices.py."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.groups: dict[tuple[int, ...], Any] = {}
        self.mesh: Any = None


def make(name: str, cuda: bool = False) -> Engine:
    if name in ("fsdp", "pipeline", "tensor", "spatial"):
        return SplitEngine(name)
    if name == "ddp":
        return ModuleEngine("cpu:gloo,cuda:nccl") if cuda else DdpEngine()
    if name == "ps":
        from bench.worker.parameter_server import ParameterServerEngine

        return ParameterServerEngine()
    if name == "ps-async":
        from bench.worker.ps_async import AsynchronousServerEngine

        return AsynchronousServerEngine()
    if name == "easgd":
        from bench.worker.easgd import ElasticEngine

        return ElasticEngine()
    if name == "local-sgd":
        from bench.worker.local_sgd import LocalSgdEngine

        return LocalSgdEngine()
    if name == "hogwild":
        from bench.worker.hogwild import HogwildEngine

        return HogwildEngine()
    return HorovodEngine(cuda)
