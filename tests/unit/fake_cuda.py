"""A fake of torch.cuda with 8 devices, streams and a clock of its own. It refuses what a rank must not do."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import mul

DEVICES = 8
PRODUCT_S = 1e-3  # of two matrices
LAUNCH_S = 10e-6  # host time to start one piece of work


class Misuse(Exception):
    """Work or a wait on a device of another rank, or a wait for all streams of a device."""


@dataclass
class Machine:
    """The devices as one rank sees them. A time is when a stream has done all work it was given."""

    rank: int
    current: int = 0
    capability: tuple[int, int] = (8, 0)
    host: float = 0.0
    compute: list[float] = field(default_factory=lambda: [0.0] * DEVICES)
    nccl: list[float] = field(default_factory=lambda: [0.0] * DEVICES)
    broken: bool = False  # the device multiplies wrongly

    def use(self, device: int) -> int:
        if device != self.rank:
            raise Misuse(f"rank {self.rank} uses device {device}")
        return device

    def kernel(self, seconds: float) -> None:
        """Start work on the compute stream."""
        device = self.use(self.current)
        self.host += LAUNCH_S
        self.compute[device] = max(self.compute[device], self.host) + seconds

    def collective(self, seconds: float) -> None:
        """NCCL starts when the compute stream has the gradient, beside the compute that follows."""
        device = self.use(self.current)
        self.host += LAUNCH_S
        self.nccl[device] = max(self.nccl[device], self.compute[device], self.host) + seconds

    def host_waits_for_nccl(self) -> None:
        """Horovod: the handle is done when NCCL is done."""
        self.host = max(self.host, self.nccl[self.use(self.current)])

    def stream_waits_for_nccl(self) -> None:
        """DistributedDataParallel: the host goes on, the compute stream waits."""
        device = self.use(self.current)
        self.compute[device] = max(self.compute[device], self.nccl[device])

    def set_device(self, device: int) -> None:
        self.current = self.use(device)

    def synchronize(self, device: int | None = None) -> None:
        raise Misuse("a wait for the whole device also waits for NCCL")

    def torch(self) -> types.ModuleType:
        """The module that replaces torch."""
        machine = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.timing = enable_timing

            def record(self) -> None:
                self.device = machine.use(machine.current)
                machine.host += LAUNCH_S
                self.at = max(machine.compute[self.device], machine.host)

            def synchronize(self) -> None:
                machine.use(self.device)
                machine.host = max(machine.host, self.at)

            def elapsed_time(self, end: Event) -> float:
                if not (self.timing and end.timing) or max(self.at, end.at) > machine.host:
                    raise RuntimeError("both events must be recorded with timing and be complete")
                return (end.at - self.at) * 1000

        class Matrix:
            """A square matrix on the CPU or on a device, which works only for its own rank."""

            def __init__(self, rows: list[list[float]], place: str = "cpu", dtype: str = "float32") -> None:
                self.rows, self.place, self.dtype = rows, place, dtype

            def each(self, change: Callable[[float], float]) -> Matrix:
                return Matrix([[change(value) for value in row] for row in self.rows], self.place, self.dtype)

            def __rmul__(self, factor: float) -> Matrix:
                return self.each(lambda value: factor * value)

            def __sub__(self, other: float) -> Matrix:
                return self.each(lambda value: value - other)

            def to(self, place: str, dtype: str) -> Matrix:
                machine.use(int((place if place != "cpu" else self.place).partition(":")[2]))
                return Matrix(self.rows, place, dtype)

            def __matmul__(self, other: Matrix) -> Matrix:
                if (self.place, self.dtype) != (other.place, other.dtype):
                    raise Misuse(f"a product of {self.place} {self.dtype} and {other.place} {other.dtype}")
                columns = list(zip(*other.rows, strict=True))
                rows = [[sum(map(mul, row, column)) for column in columns] for row in self.rows]
                if self.place != "cpu":
                    machine.kernel(PRODUCT_S)
                    rows[0][0] += machine.broken
                return Matrix(rows, self.place, self.dtype)

        module = types.ModuleType("torch")
        module.Generator = lambda: types.SimpleNamespace(manual_seed=random.Random)
        module.randint = lambda low, high, size, generator: Matrix(
            [[generator.randrange(low, high) for _ in range(size[1])] for _ in range(size[0])]
        )
        module.equal = lambda a, b: a.rows == b.rows
        module.float32 = "float32"
        module.version = types.SimpleNamespace(cuda="13.0")
        module.Tensor = object
        module.nn = types.SimpleNamespace(Module=object)
        # The defaults of torch: convolutions may use TF32.
        module.backends = types.SimpleNamespace(
            cudnn=types.SimpleNamespace(benchmark=False, allow_tf32=True),
            cuda=types.SimpleNamespace(matmul=types.SimpleNamespace(allow_tf32=False)),
        )
        module.float16, module.bfloat16 = "float16", "bfloat16"
        module.contiguous_format, module.memory_format = "contiguous_format", str
        module.autocast = lambda kind, dtype, enabled: (kind, dtype) if enabled else None
        module.amp = types.SimpleNamespace(GradScaler=lambda kind, enabled: (kind, enabled))
        module.cuda = types.SimpleNamespace(
            device_count=lambda: DEVICES,
            is_available=lambda: True,
            get_device_name=lambda: "NVIDIA A100-SXM4-80GB",
            nccl=types.SimpleNamespace(version=lambda: (2, 27, 7)),
            get_device_properties=lambda device: types.SimpleNamespace(uuid=f"0000000{device}"),
            get_device_capability=lambda: self.capability,
            set_device=self.set_device,
            synchronize=self.synchronize,
            Event=Event,
        )
        return module
