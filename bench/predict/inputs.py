"""The inputs of a prediction: the configuration, and the quantities that the model assumes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bench.catalogue import gpu_rates, interconnect, models
from bench.parse import TRANSPORTS, positive
from cluster.core.errors import UserError
from cluster.core.numbers import LARGEST

ENGINES = ("horovod", "ddp", "ps")
OVERLAPS = ("none", "tensor", "fused")
INTERCONNECTS = ("auto", "pcie", "nvlink")
LINKS = ("auto", "native")

# Wire bytes over single-precision bytes, and milliseconds to encode and decode one tensor.
COMPRESSIONS = {"none": (1.0, 0.0), "fp16": (0.5, 0.02), "1bit": (1 / 32, 0.1)}

# In MiB, as both programs count: Horovod 128 since November 2020, PyTorch DDP 25.
DEFAULT_FUSION_MB = {"horovod": 128.0, "ddp": 25.0, "ps": 0.0}

# Rates of Ethernet ports. A rate in between is a limiter on the next faster port: after idle time, bursts are sent at
# the port's rate, but a step sends no more than the limit times its duration. This was measured at 2.5 and 5 Gbit/s
# (lowbandwidth.csv: 0.7 ms + 1266 Mbit / rate, which includes all of the 43 ms of forward).
PORT_GBPS = (1, 10, 25, 40, 50, 100, 200, 400, 800)

# Two dies on one board share its power and its PCIe slot. With both in use, each is slower (batchai: 0.74 with four
# GPUs; TensorFlow on EC2: 0.90 with eight).
SHARED_BOARD = {"k80": 0.86}

# Relative uncertainty of a single-GPU rate: measured by the user, published by others (three V100 rates at batch 64
# differ by a third), or scaled from another network.
MEASURED_DOUBT, PROFILE_DOUBT, SCALED_DOUBT = 0.01, 0.08, 0.3


@dataclass(frozen=True)
class Parameters:
    """What the model assumes beside the configuration. Each is a quantity that can be measured."""

    backward_share: float = 2 / 3
    # No published table was measured over EFA: it has the values of verbs until one is.
    goodput: tuple[tuple[str, float], ...] = (("tcp", 0.96), ("verbs", 0.96), ("efa", 0.96))
    # Published runs over TCP at 40 Gbit/s and above reached 20 to 33 Gbit/s.
    ceiling_gbps: tuple[tuple[str, float], ...] = (("tcp", 25.0), ("verbs", math.inf), ("efa", math.inf))
    launch_ms: float = 0.15
    local_launch_ms: float = 0.05
    ring_hop_ms: float = 0.012
    # Libraries switch from rings to trees when rings get too long: at about sixty ranks with these two values.
    tree_hop_ms: float = 0.12
    # Bandwidth lost per doubling of the nodes beyond two.
    node_loss: float = 0.04
    # Mean delay in one GPU's step, as a share of it; a synchronous step waits for the slowest.
    jitter: float = 0.018
    # Compute lost per unit of data transfer that overlaps it (copies, cores, memory bandwidth).
    interference: float = 0.05
    # Factor on the bandwidth between the GPUs of a node.
    intra: float = 1.0
    # Uncertainty of the bandwidth, as a factor: known from the line rate or a fit, and unknown.
    known_doubt: float = 1.12
    unknown_doubt: float = 1.3
    fitted: bool = False
    # Shares of the straggler loss that may be absent and that may be added; the uncertainty that remains.
    jitter_doubt: tuple[float, float] = (1.0, 1.5)
    rest: float = 0.02

    def with_ceiling(self, transport: str, gbps: float) -> Parameters:
        """A copy with a bandwidth fitted on this transport. The fit includes goodput."""
        ceiling = dict(self.ceiling_gbps) | {transport: gbps}
        good = dict(self.goodput) | {transport: 1.0}
        return replace(self, ceiling_gbps=tuple(ceiling.items()), goodput=tuple(good.items()), fitted=True)


DEFAULTS = Parameters()


@dataclass(frozen=True)
class Setup:
    """One configuration to predict. `single_step_ms` is a step on one GPU, alone."""

    model: str
    batch: int
    single_step_ms: float
    gpus: int
    gpus_per_node: int
    rate_gbps: float | None = None
    transport: str = "tcp"
    engine: str = "horovod"
    compression: str = "none"
    fusion_mb: float | None = None
    cycle_ms: float = 1.0
    overlap: str = "fused"
    interconnect: str = "auto"
    link: str = "auto"
    hierarchical: bool = False
    gpu: str | None = None
    input_images_per_second: float | None = None
    servers: int | None = None
    # Relative uncertainty of single_step_ms.
    compute_doubt: float = 0.01

    def __post_init__(self) -> None:
        models.get(self.model)
        for field in ("batch", "gpus", "gpus_per_node"):
            value = getattr(self, field)
            if value < 1:
                raise UserError(f"{_flag(field)}: {value} must be at least 1")
        for field in ("single_step_ms", "rate_gbps", "input_images_per_second", "servers"):
            if (value := getattr(self, field)) is not None:
                positive(value, _flag(field))
        for field in ("fusion_mb", "cycle_ms"):
            if (value := getattr(self, field)) is not None and not 0 <= value <= LARGEST:
                raise UserError(f"{_flag(field)}: {value:g} must be 0 or more")
        for field, known in (
            ("transport", TRANSPORTS),
            ("engine", ENGINES),
            ("compression", tuple(COMPRESSIONS)),
            ("overlap", OVERLAPS),
            ("interconnect", INTERCONNECTS),
            ("link", LINKS),
        ):
            if getattr(self, field) not in known:
                raise UserError(f"{_flag(field)}: {getattr(self, field)!r} is not known, use one of {', '.join(known)}")
        # One GPU is the baseline of every curve, so it is allowed beside whole nodes.
        if self.gpus != 1 and self.gpus % self.gpus_per_node:
            raise UserError(
                f"--gpus: {self.gpus} is not a multiple of --gpus-per-node {self.gpus_per_node}, "
                f"use {math.ceil(self.gpus / self.gpus_per_node) * self.gpus_per_node}"
            )
        if self.nodes > 1 and self.rate_gbps is None:
            raise UserError(f"--rate-gbps: needed for {self.nodes} nodes, give the link rate of one node in Gbit/s")
        if self.servers is not None and self.engine != "ps":
            raise UserError("--servers: only --engine ps has parameter servers")

    @property
    def every_tensor(self) -> bool:
        """Each gradient is sent on its own: by choice, with fusion switched off, or to parameter servers."""
        return self.overlap == "tensor" or self.engine == "ps" or (self.overlap == "fused" and self.fusion_mb == 0)

    @property
    def nodes(self) -> int:
        return max(1, self.gpus // self.gpus_per_node)

    @property
    def images_per_step(self) -> int:
        return self.gpus * self.batch

    @property
    def single_images_per_second(self) -> float:
        return 1000 * self.batch / self.single_step_ms

    @property
    def intra_gbytes(self) -> float:
        return interconnect.gbytes(self.interconnect, self.gpu, self.gpus_per_node)

    @property
    def port_gbps(self) -> float:
        """Rate of a node's port without a limiter."""
        rate = self.rate_gbps or math.inf
        if self.link == "native" or self.transport != "tcp":
            return rate
        return next((port for port in PORT_GBPS if port >= rate), rate)


def single_step(
    model: str, batch: int, gpu: str | None, precision: str | None, single_rate: float | None
) -> tuple[float, str, float]:
    """Milliseconds of a step on one GPU, the source of that figure, and its relative uncertainty."""
    network = models.get(model)
    if gpu is not None:
        gpu_rates.get(gpu)
    if batch < 1:
        raise UserError(f"--batch: {batch} must be at least 1")
    if single_rate is not None:
        return 1000 * batch / positive(single_rate, "--single-rate"), "given", MEASURED_DOUBT
    if gpu is None:
        raise UserError(f"--gpu: give a profile ({', '.join(gpu_rates.PROFILES)}) or a measured --single-rate")
    step, source = gpu_rates.compute_ms(gpu, model, batch, precision)
    return step, source, PROFILE_DOUBT if network.name == gpu_rates.REFERENCE_MODEL else SCALED_DOUBT


def _flag(field: str) -> str:
    names = {"input_images_per_second": "input-rate", "single_step_ms": "single-rate"}
    return "--" + names.get(field, field.replace("_", "-"))
