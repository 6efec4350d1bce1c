"""The device that a rank computes on. Every call to CUDA is in this file.

Importing it needs no torch, so that a fake of torch.cuda can test it (tests/unit/fake_cuda.py).
"""

import time
from typing import Any, Protocol

# The first GPUs that compute in TF32 and bf16.
AMPERE = (8, 0)


class Arithmetic:
    """How a device computes: `run` is the context of the forward pass, `scaler` keeps small fp16 gradients from zero.

    Both do nothing unless the precision needs them.
    """

    def __init__(self, kind: str, precision: str) -> None:
        import torch

        self.precision, self.kind = precision, kind
        self.dtype = torch.float16 if precision == "amp fp16" else torch.bfloat16
        self.scaler = torch.amp.GradScaler(kind, enabled=precision == "amp fp16")
        self.autocast = torch.autocast

    def run(self) -> Any:
        return self.autocast(self.kind, dtype=self.dtype, enabled=self.precision.startswith("amp"))


class Accelerator(Protocol):
    """Marks are moments on the compute stream. Their times are known once the last of them was waited for."""

    place: str  # the name that torch gives the device
    gpu: str | None  # the name that nvidia-smi gives it

    def mark(self, again: Any = None) -> Any:
        """A mark behind the work that was started so far; `again` is an earlier mark to use again."""

    def wait(self, mark: Any) -> None: ...
    def seconds(self, first: Any, last: Any) -> float: ...

    @property
    def ampere(self) -> bool:
        """Whether it computes in TF32 and bf16."""

    def facts(self) -> dict[str, str]:
        """Name of the device, and versions of CUDA and NCCL."""

    def arithmetic(self, precision: str) -> Arithmetic:
        """Compute in fp32, tf32, amp bf16 or amp fp16 from now on."""


class Cpu:
    """Work on the CPU is done when its call returns: a mark is the time."""

    place = "cpu"
    gpu: str | None = None
    ampere = False

    def mark(self, again: Any = None) -> Any:
        return time.perf_counter()

    def wait(self, mark: Any) -> None: ...

    def seconds(self, first: Any, last: Any) -> float:
        return float(last - first)

    def facts(self) -> dict[str, str]:
        return {"name": "CPU", "cuda": "", "nccl": ""}

    def arithmetic(self, precision: str) -> Arithmetic:
        return Arithmetic("cpu", precision)


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
        self.cuda, self.backends, self.version = torch.cuda, torch.backends, torch.version
        self.place = f"cuda:{local_rank}"
        # By its UUID: CUDA_VISIBLE_DEVICES changes the numbers.
        self.gpu: str | None = f"GPU-{torch.cuda.get_device_properties(local_rank).uuid}"

    def mark(self, again: Any = None) -> Any:
        event = again or self.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def seconds(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1000

    @property
    def ampere(self) -> bool:
        return bool(self.cuda.get_device_capability() >= AMPERE)

    def facts(self) -> dict[str, str]:
        nccl = ".".join(map(str, self.cuda.nccl.version()))
        return {"name": self.cuda.get_device_name(), "cuda": str(self.version.cuda), "nccl": nccl}

    def arithmetic(self, precision: str) -> Arithmetic:
        # torch's default allows TF32 in convolutions: fp32 has to forbid it.
        self.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        self.backends.cudnn.allow_tf32 = precision == "tf32"
        return Arithmetic("cuda", precision)


def computed_in(precision: str, ampere: list[bool]) -> str:
    """What a plan's precision means on the GPUs of all ranks, of which `ampere` has one value each."""
    if precision == "amp":
        return "amp bf16" if all(ampere) else "amp fp16"
    if precision == "tf32" and not all(ampere):
        raise RuntimeError("plan.precision: tf32 needs GPUs from Ampere on; use fp32 or amp")
    return precision


def make(cuda: bool, local_rank: int) -> Accelerator:
    return Cuda(local_rank) if cuda else Cpu()


def count() -> int:
    """GPUs that torch sees; 0 where it cannot use any."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def names() -> list[str]:
    """The name of every GPU that torch sees."""
    import torch

    return [torch.cuda.get_device_name(one) for one in range(count())]


def nccl_version() -> str:
    """Empty without a GPU: torch's CPU build has no NCCL."""
    import torch

    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""


def present() -> bool:
    """Whether this machine has a GPU that torch can use."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
