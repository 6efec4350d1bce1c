"""The inputs of a prediction: the configuration, and the quantities that the model assumes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from bench.catalogue import gpu_rates, interconnect, models
from bench.parse import TRANSPORTS, positive
from cluster.core.errors import UserError
from cluster.core.numbers import LARGEST

ENGINES = ("horovod", "ddp", "ps", "ps-async", "easgd", "local-sgd", "hogwild")
# Those of them that are parameter servers or exchange weights: they fuse no gradients.
UNFUSED = ("ps", "ps-async", "easgd", "local-sgd", "hogwild")
OVERLAPS = ("none", "tensor", "fused")
INTERCONNECTS = ("auto", "pcie", "nvlink")
LINKS = ("native", "limiter", "cloud")
LINK_HELP = (
    "native: a port of this rate (default); limiter: the rate is a limit on the next faster Ethernet port; cloud: "
    "virtual machines, where TCP reaches a few Gbit/s of a faster port"
)
PRECISIONS = ("fp32", "tf32", "amp", "fp16")
COLLECTIVES = ("nccl", "mpi", "gloo")
# even: every server an equal share; tensors: servers hold whole tensors; nodes: the workers serve whole tensors.
PLACEMENTS = ("even", "tensors", "nodes")

# Wire bytes over single-precision bytes, and milliseconds to encode and decode one tensor.
COMPRESSIONS = {"none": (1.0, 0.0), "fp16": (0.5, 0.02), "1bit": (1 / 32, 0.1)}

# Bytes of one gradient element in the all-reduce. Automatic mixed precision keeps weights and gradients in single
# precision; training in fp16 does not.
GRADIENT_BYTES = {"fp32": 4, "tf32": 4, "amp": 4, "fp16": 2}

# In MiB, as both programs count: Horovod 128 since November 2020, PyTorch DDP 25.
DEFAULT_FUSION_MB = {"horovod": 128.0, "ddp": 25.0, **dict.fromkeys(UNFUSED, 0.0)}

# Rates of Ethernet ports. A limiter is on the next faster port: after idle time, bursts are sent at the port's rate,
# but a step sends no more than the limit times its duration. This was measured at 2.5 and 5 Gbit/s (lowbandwidth.csv:
# 0.7 ms + 1266 Mbit / rate, which includes all of the 43 ms of forward).
PORT_GBPS = (1, 10, 25, 40, 50, 100, 200, 400, 800)

# Two dies on one board share its power and its PCIe slot. With both in use, each is slower: 0.74 (batchai, 4 GPUs),
# 0.90 and 0.96 (TensorFlow, 8), 0.94 (e-bug, 8).
SHARED_BOARD = {"k80": 0.868}

# Step times in half precision are shorter, the host's delays are not.
HALF_PRECISION = ("amp", "fp16")

# Port rate that clusters with these GPUs usually have, Gbit/s per node, where it is not stated: the vendor's reference
# designs. Over TCP: what cloud machines reached.
USUAL_GBPS = {"a100": 800.0, "h100": 1600.0}

# Relative uncertainty of a single-GPU rate: measured by the user, published by others (three V100 rates at batch 64
# differ by a third), or scaled from another network.
MEASURED_DOUBT, PROFILE_DOUBT, SCALED_DOUBT = 0.01, 0.08, 0.3

# Factor on the interval that holds 85% of the published rows, by kind, each laboratory counting alike: without any
# measurement of the cluster, and fitted on one. `bench predict --validate --by-source` judges them.
WIDTHS = {"one node": 1.6, "rate stated": 1.1, "rate not stated": 1.1, "parameter servers": 3.6}
FITTED_WIDTHS = {"one node": 1.6, "rate stated": 1.7, "rate not stated": 1.0, "parameter servers": 2.8}


@dataclass(frozen=True)
class Parameters:
    """What the model assumes beside the configuration. Each is a quantity that can be measured."""

    backward_share: float = 2 / 3
    # No published table was measured over EFA: it has the values of verbs until one is.
    goodput: tuple[tuple[str, float], ...] = (("tcp", 0.96), ("verbs", 0.96), ("efa", 0.96))
    # A bandwidth that was measured. Nothing exceeds it.
    ceiling_gbps: tuple[tuple[str, float], ...] = (("tcp", math.inf), ("verbs", math.inf), ("efa", math.inf))
    # What one node's TCP streams reach on a fast port: published runs reached 14 at 25 Gbit/s, 20 at 40, and 20 to 33
    # at 100. Beyond 40 Gbit/s it grows with this power of the port's rate: hosts with faster ports use more streams.
    tcp_knee_gbps: float = 17.5
    tcp_growth: float = 0.3
    # Measured over predicted bandwidth. It carries over to other rates.
    link_factor: float = 1.0
    # Bandwidth where the rate is not stated, and of TCP between virtual machines: clouds limit each of its streams.
    prior_gbps: tuple[tuple[str, float], ...] = (("tcp", 4.0), ("verbs", 60.0), ("efa", 60.0))
    # Bandwidth of n ports: n to the power of 1 minus this.
    rail_loss: float = 0.14
    # Ring bandwidth of MPI and Gloo on buffers in CPU memory, GB/s. Gloo has the value of MPI: no table has it.
    cpu_gbytes: float = 0.85
    # A parameter server's own bandwidth per direction, GB/s: evenly sharded (BytePS), and what one gRPC connection of
    # TensorFlow's copies and serialises.
    server_gbytes: float = 8.0
    grpc_gbytes: float = 0.12
    # Push and pull after backward take this many times as long as one of them: a link has two directions.
    ps_turns: float = 1.7
    # Traffic inside a node to and from its parameter server, in units of the model's bytes.
    ps_local: float = 2.5
    # Bandwidth lost where many workers send to one port at once. Measured between four processes on shaped links.
    incast: float = 0.22
    # A server with a barrier answers when all workers have sent: time lost on the way, as a share. Measured likewise.
    server_wait: float = 0.15
    launch_ms: float = 0.15
    local_launch_ms: float = 0.05
    ring_hop_ms: float = 0.012
    # Libraries switch from rings to trees when rings get too long: at about sixty ranks with these two values.
    tree_hop_ms: float = 0.12
    # Bandwidth lost per doubling of the nodes beyond two.
    node_loss: float = 0.04
    # Mean delay in one GPU's step, as a share of it; a synchronous step waits for the slowest.
    jitter: float = 0.018
    # Factor on it in half precision.
    half_jitter: float = 2.0
    # Compute lost per unit of data transfer that overlaps it (copies, cores, memory bandwidth).
    interference: float = 0.05
    # Factor on the bandwidth between the GPUs of a node.
    intra: float = 1.0
    # Uncertainty of the bandwidth, as a factor: known from the line rate or a fit, and unknown.
    known_doubt: float = 1.12
    unknown_doubt: float = 1.3
    tcp_doubt: float = 1.6
    no_rate_doubt: float = 2.5
    intra_doubt: float = 1.3
    cpu_doubt: float = 1.3
    server_doubt: float = 1.6
    # Loss that frameworks and hosts may add, as a share of the step.
    host_doubt: float = 0.05
    fitted: bool = False
    # The most nodes that were measured, and the doubt for each doubling beyond them, as a share of the step.
    fitted_nodes: int | None = None
    growth_doubt: float = 0.015
    # Other values that explain the anchor about as well: a slower network with faster hosts, and the reverse.
    others: tuple[Parameters, ...] = ()
    # Factor on the interval; None: the one learnt for this kind of configuration.
    width: float | None = None
    # Shares of the straggler loss that may be absent and that may be added; the uncertainty that remains.
    jitter_doubt: tuple[float, float] = (1.0, 1.5)
    rest: float = 0.02

    def with_ceiling(self, transport: str, gbps: float) -> Parameters:
        """A copy that never exceeds a measured bandwidth."""
        ceiling = dict(self.ceiling_gbps) | {transport: gbps}
        return replace(self, ceiling_gbps=tuple(ceiling.items()), fitted=True)


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
    link: str = "native"
    hierarchical: bool = False
    gpu: str | None = None
    input_images_per_second: float | None = None
    servers: int | None = None
    # Relative uncertainty of single_step_ms.
    compute_doubt: float = 0.01
    seq_len: int | None = None
    # None: not known, taken as single precision.
    precision: str | None = None
    grad_accum: int = 1
    collective: str = "nccl"
    nics: int = 1
    placement: str = "even"
    # Whether a missing rate_gbps means that the rate is not known.
    rate_unknown: bool = False
    # Steps from one exchange of weights to the next, engines easgd and local-sgd.
    period: int = 4

    def __post_init__(self) -> None:
        models.get(self.model, self.seq_len)
        for field in ("batch", "gpus", "gpus_per_node", "grad_accum", "nics", "period"):
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
            ("precision", (None, *PRECISIONS)),
            ("collective", COLLECTIVES),
            ("placement", PLACEMENTS),
        ):
            if getattr(self, field) not in known:
                words = ", ".join(filter(None, known))
                raise UserError(f"{_flag(field)}: {getattr(self, field)!r} is not known, use one of {words}")
        # A part of one node is allowed beside whole nodes: one GPU is the baseline of every curve.
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise UserError(
                f"--gpus: {self.gpus} is not a multiple of --gpus-per-node {self.gpus_per_node}, "
                f"use {math.ceil(self.gpus / self.gpus_per_node) * self.gpus_per_node}"
            )
        if self.nodes > 1 and self.rate_gbps is None and not self.rate_unknown:
            raise UserError(
                f"--rate-gbps: needed for {self.nodes} nodes, give the rate of one port in Gbit/s, or `unknown`"
            )
        if self.engine == "hogwild" and self.nodes > 1:
            raise UserError(f"--engine hogwild: shares the memory of one node, not of {self.nodes}; use fewer --gpus")
        if self.servers is not None and self.engine != "ps":
            raise UserError("--servers: only --engine ps has parameter servers")
        if self.placement != "even" and self.engine != "ps":
            raise UserError("--placement: only --engine ps has parameter servers")

    @property
    def every_tensor(self) -> bool:
        """Each gradient is sent on its own: by choice, with fusion switched off, or to parameter servers."""
        return self.overlap == "tensor" or self.engine in UNFUSED or (self.overlap == "fused" and self.fusion_mb == 0)

    @property
    def nodes(self) -> int:
        return max(1, self.gpus // self.gpus_per_node)

    @property
    def network(self) -> models.Model:
        return models.get(self.model, self.seq_len)

    @property
    def gradient_bytes(self) -> float:
        """Bytes per element in the all-reduce, without compression."""
        return GRADIENT_BYTES[self.precision or "fp32"]

    @property
    def kind(self) -> str:
        """Configurations of one kind have been predicted equally well."""
        if self.engine in UNFUSED and self.engine != "local-sgd":
            return "parameter servers"
        if self.nodes == 1:
            return "one node"
        return "rate stated" if self.rate_gbps is not None else "rate not stated"

    def on_one_node(self) -> Setup:
        return replace(self, gpus=min(self.gpus, self.gpus_per_node), servers=None)

    @property
    def images_per_step(self) -> int:
        return self.gpus * self.batch * self.grad_accum

    @property
    def single_images_per_second(self) -> float:
        return 1000 * self.batch / self.single_step_ms

    @property
    def intra(self) -> str:
        return interconnect.resolve(self.interconnect, self.gpu, self.gpus_per_node)

    @property
    def intra_gbytes(self) -> float:
        return interconnect.gbytes(self.interconnect, self.gpu, self.gpus_per_node)

    @property
    def port_gbps(self) -> float:
        """Rate of one port without a limiter."""
        rate = self.rate_gbps or math.inf
        if self.link != "limiter":
            return rate
        return next((port for port in PORT_GBPS if port >= rate), rate)


def single_step(
    model: str,
    batch: int,
    gpu: str | None,
    precision: str | None,
    single_rate: float | None,
    seq_len: int | None = None,
) -> tuple[float, str, float]:
    """Milliseconds of a step on one GPU, the source of that figure, and its relative uncertainty."""
    network = models.get(model, seq_len)
    if gpu is not None:
        gpu_rates.get(gpu)
    if batch < 1:
        raise UserError(f"--batch: {batch} must be at least 1")
    if single_rate is not None:
        return 1000 * batch / positive(single_rate, "--single-rate"), "given", MEASURED_DOUBT
    if gpu is None and not gpu_rates.with_rates(network):
        raise UserError(f"--single-rate: missing; no rate of {model} is published, so measure one GPU")
    if gpu is None:
        raise UserError(f"--gpu: give a profile ({', '.join(gpu_rates.PROFILES)}) or a measured --single-rate")
    step, source = gpu_rates.compute_ms(gpu, model, batch, precision, seq_len)
    known = network.name == gpu_rates.REFERENCE_MODEL or gpu_rates.own_rates(gpu, network) is not None
    return step, source, PROFILE_DOUBT if known else SCALED_DOUBT


def precision(
    asked: str | None, single_rate: float | None, gpu: str | None, model: str, seq_len: int | None
) -> str | None:
    """The one whose rate is used: as asked, or the profile's usual one; None with a measured rate."""
    if asked is not None or single_rate is not None or gpu is None:
        return asked
    return gpu_rates.usual_precision(gpu, model, seq_len)


def _flag(field: str) -> str:
    names = {"input_images_per_second": "input-rate", "single_step_ms": "single-rate"}
    return "--" + names.get(field, field.replace("_", "-"))
