"""The device that a rank computes on. Every call to CUDA is in this file.

Importing it needs no torch, so that a fake of torch.cuda can test it (tests/unit/fake_cuda.py).
"""

import time
from typing import Any, Protocol


class Accelerator(Protocol):
    """Marks are moments on the compute stream. Their times are known once the last of them was waited for."""

    place: str  # the name that torch gives the device

    def mark(self, again: Any = None) -> Any:
        """A mark behind the work that was started so far; `again` is an earlier mark to use again."""

    def wait(self, mark: Any) -> None: ...
    def seconds(self, first: Any, last: Any) -> float: ...


class Cpu:
    """Work on the CPU is done when its call returns: a mark is the time."""

    place = "cpu"

    def mark(self, again: Any = None) -> Any:
        return time.perf_counter()

    def wait(self, mark: Any) -> None: ...

    def seconds(self, first: Any, last: Any) -> float:
        return float(last - first)


class Cuda:
    """One GPU. It never waits for the whole device: that would also wait for NCCL, which has its own stream."""

    def __init__(self, local_rank: int) -> None:
        import torch

        if local_rank >= (count := torch.cuda.device_count()):
            raise RuntimeError(f"local rank {local_rank} has no GPU of its own: torch sees {count}")
        # Otherwise every rank opens a context on GPU 0.
        torch.cuda.set_device(local_rank)
        # All steps have the same shapes, so the search for the fastest convolutions pays.
        torch.backends.cudnn.benchmark = True
        self.cuda = torch.cuda
        self.place = f"cuda:{local_rank}"

    def mark(self, again: Any = None) -> Any:
        event = again or self.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def seconds(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1000


def make(cuda: bool, local_rank: int) -> Accelerator:
    return Cuda(local_rank) if cuda else Cpu()


def present() -> bool:
    """Whether this machine has a GPU that torch can use."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
