"""One data-parallel training step: from what a cluster is to how long a step takes and how sure that is.

A step is forward, then backward, during which gradients become ready in the order and at the times that the model's
table gives. They are merged and all-reduced one group after the other; what is not done when backward ends is exposed.
docs/predict.md gives the formulas and where each default comes from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bench.catalogue import models
from cluster.core.errors import UserError

TRANSPORTS = ("tcp", "rdma")
ENGINES = ("horovod", "ddp", "ps")
OVERLAPS = ("none", "tensor", "fused")
INTERCONNECTS = ("auto", "pcie", "nvlink")
LINKS = ("auto", "native")

# Wire bytes over single-precision bytes, and milliseconds to encode and decode one tensor.
COMPRESSIONS = {"none": (1.0, 0.0), "fp16": (0.5, 0.02), "1bit": (1 / 32, 0.1)}

# Ring bandwidth between the GPUs of a node, GB/s. PCIe: 153 MB in 24 ms (hkbu, 4 GPUs).
INTRA_GBYTES = {"pcie": 6.4, "nvlink": 40.0}

# Horovod 128 MB since November 2020; PyTorch DDP 25 MB.
DEFAULT_FUSION_MB = {"horovod": 128.0, "ddp": 25.0, "ps": 0.0}

# Rates that Ethernet ports have. A node on a rate in between sits behind a limiter on the next faster port: after idle
# time, bursts leave at the port's rate, but a step sends no more than the limit times its length. So it was measured
# at 2.5 and 5 Gbit/s (lowbandwidth: 0.7 ms + 1266 Mbit / rate, nothing left of the 43 ms of forward).
PORT_GBPS = (1, 10, 25, 40, 50, 100, 200, 400, 800)

# Two dies on one board share its power and its PCIe slot: with both at work each is slower (batchai 0.74 with four
# GPUs, TensorFlow's EC2 figures 0.90 with eight).
SHARED_BOARD = {"k80": 0.86}


@dataclass(frozen=True)
class Parameters:
    """What the model has to know beyond the question. Few, each a quantity one could measure."""

    backward_share: float = 2 / 3
    goodput: tuple[tuple[str, float], ...] = (("tcp", 0.96), ("rdma", 0.96))
    # TCP at 40 Gbit/s and above: 20 to 33 Gbit/s were reached.
    ceiling_gbps: tuple[tuple[str, float], ...] = (("tcp", 25.0), ("rdma", math.inf))
    launch_ms: float = 0.15
    local_launch_ms: float = 0.05
    ring_hop_ms: float = 0.012
    # Libraries go over to trees where rings get too long, at some sixty ranks with these two figures.
    tree_hop_ms: float = 0.12
    # Bandwidth lost per doubling of the nodes beyond two.
    node_loss: float = 0.04
    # Mean delay in one GPU's step, as a share of it; a synchronous step waits for the slowest.
    jitter: float = 0.018
    # Compute lost per unit of data transfer that runs beside it (copies, cores, memory bandwidth).
    interference: float = 0.05
    # Factor on the bandwidth between the GPUs of a node.
    intra: float = 1.0
    # How far off the bandwidth may be, as a factor: where the line rate or a fit sets it, and where nothing does.
    known_doubt: float = 1.12
    unknown_doubt: float = 1.3
    fitted: bool = False
    # Share of the straggler loss that may be absent, and that may come on top; what no other doubt explains.
    jitter_doubt: tuple[float, float] = (1.0, 1.5)
    rest: float = 0.02

    def with_ceiling(self, transport: str, gbps: float) -> Parameters:
        """The same with a bandwidth that was fitted on this transport, so goodput is in it already."""
        rest = tuple(item for item in self.ceiling_gbps if item[0] != transport)
        good = tuple(item for item in self.goodput if item[0] != transport)
        return replace(
            self,
            ceiling_gbps=(*rest, (transport, gbps)),
            goodput=(*good, (transport, 1.0)),
            fitted=True,
        )


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
    # Share by which single_step_ms may be off.
    compute_doubt: float = 0.01

    def __post_init__(self) -> None:
        models.get(self.model)
        for field in ("batch", "gpus", "gpus_per_node"):
            value = getattr(self, field)
            if value < 1:
                raise UserError(f"{_flag(field)}: {value} must be at least 1")
        for field in ("single_step_ms", "rate_gbps", "fusion_mb", "input_images_per_second", "servers"):
            value = getattr(self, field)
            least = 0 if field == "fusion_mb" else None
            if value is None:
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and least is None):
                raise UserError(f"{_flag(field)}: {value:g} must be a number above 0")
        if not math.isfinite(self.cycle_ms) or self.cycle_ms < 0:
            raise UserError(f"--cycle-ms: {self.cycle_ms:g} must be 0 or more")
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
        # One GPU is the baseline of every curve, so it is asked for together with whole nodes.
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
        """Each gradient travels on its own: asked for, by fusion switched off, or as parameter servers work."""
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
        kind = self.interconnect
        if kind == "auto":
            linked = self.gpus_per_node >= 8 or (self.gpu or "").startswith(("a100", "h100"))
            kind = "nvlink" if linked and self.gpu != "k80" else "pcie"
        return INTRA_GBYTES[kind]

    @property
    def port_gbps(self) -> float:
        """What the port of a node does when it is not held back."""
        rate = self.rate_gbps or math.inf
        if self.link == "native" or self.transport != "tcp":
            return rate
        return next((port for port in PORT_GBPS if port >= rate), rate)


@dataclass(frozen=True)
class Prediction:
    """A step's time and where it goes: step = compute + straggler + exposed communication + input wait."""

    images_per_second: float
    efficiency: float
    step_ms: float
    compute_ms: float
    straggler_ms: float
    exposed_comm_ms: float
    input_wait_ms: float
    comm_ms: float
    bus_gbps: float | None
    low: float
    high: float
    bottleneck: str


@dataclass(frozen=True)
class _Step:
    compute: float
    straggler: float
    exposed: float
    wait: float
    comm: float
    latency: float
    bus_gbps: float | None

    @property
    def total(self) -> float:
        return self.compute + self.straggler + self.exposed + self.wait


def expected_slowest(count: int) -> float:
    """How far the slowest of `count` GPUs lags behind one, in mean delays.

    Delays come from interrupts, collisions and clocks and have an exponential tail: the largest of n is the n-th
    harmonic number, of which a single GPU's step contains one already.
    """
    return sum(1 / k for k in range(2, count + 1)) if count < 64 else math.log(count) + 0.5772 + 0.5 / count - 1


def predict(setup: Setup, parameters: Parameters = DEFAULTS) -> Prediction:
    step = _simulate(setup, parameters)
    low, high = _interval(setup, parameters, step)
    rate = 1000 * setup.images_per_step / step.total
    return Prediction(
        images_per_second=rate,
        efficiency=min(1.0, setup.single_step_ms / step.total),
        step_ms=step.total,
        compute_ms=step.compute,
        straggler_ms=step.straggler,
        exposed_comm_ms=step.exposed,
        input_wait_ms=step.wait,
        comm_ms=step.comm,
        bus_gbps=step.bus_gbps,
        low=rate * low,
        high=rate * high,
        bottleneck=_bottleneck(setup, step),
    )


def step_ms(setup: Setup, parameters: Parameters = DEFAULTS) -> float:
    """The step time alone, for fits that evaluate it many times."""
    return _simulate(setup, parameters).total


def link_gbps(setup: Setup, parameters: Parameters) -> float:
    """Payload that one node's port carries, Gbit/s: its share of the line rate, at most the transport's ceiling."""
    good = dict(parameters.goodput)[setup.transport]
    return min(good * setup.port_gbps, dict(parameters.ceiling_gbps)[setup.transport])


def _simulate(setup: Setup, parameters: Parameters) -> _Step:
    n, nodes = setup.gpus, setup.nodes
    shared = SHARED_BOARD.get(setup.gpu or "", 1.0) if n > 1 else 1.0
    compute = setup.single_step_ms / shared
    if n == 1:
        return _with_input(setup, _Step(compute, 0.0, 0.0, 0.0, 0.0, 0.0, None))
    straggler = compute * parameters.jitter * expected_slowest(n)
    busy_compute = compute + straggler
    ratio, codec_ms = COMPRESSIONS[setup.compression]
    ready = _ready_groups(setup.model, setup.every_tensor)
    forward = busy_compute * (1 - parameters.backward_share)
    backward = busy_compute * parameters.backward_share
    times = [forward + share * backward for _, share in ready]
    sizes = [4 * elements * ratio for elements, _ in ready]
    payload = sum(sizes)
    per_call, per_byte = _collective(setup, parameters)
    wire_bytes = 0.0
    if setup.engine == "ps" and nodes > 1:
        end, calls, wire_bytes = _parameter_server(setup, parameters, times, sizes)
        busy, bus = end - times[0], None
        moving = busy
        latency = parameters.launch_ms
    else:
        end, calls = _finish(setup, times, sizes, per_call, per_byte)
        moving = payload * per_byte
        busy = calls * per_call + moving
        latency = calls * per_call
        bus = 8e-6 * payload * 2 * (n - 1) / n / busy
        wire_bytes = _ring_bytes(setup, payload)
    exposed = max(0.0, end - busy_compute)
    exposed += parameters.interference * max(0.0, moving - exposed)
    if codec_ms:
        exposed += codec_ms * models.get(setup.model).gradient_tensors
    if nodes > 1:
        good = dict(parameters.goodput)[setup.transport]
        sustained = wire_bytes * 8e-6 / ((setup.rate_gbps or math.inf) * good)
        exposed = max(exposed, sustained - busy_compute)
        busy = max(busy, sustained)
    return _with_input(setup, _Step(compute, straggler, exposed, 0.0, busy, latency, bus))


def _with_input(setup: Setup, step: _Step) -> _Step:
    if setup.input_images_per_second is None:
        return step
    on_a_node = min(setup.gpus, setup.gpus_per_node)
    least = 1000 * setup.batch * on_a_node / setup.input_images_per_second
    return replace(step, wait=max(0.0, least - step.total))


@lru_cache(maxsize=64)
def _ready_groups(model: str, every_tensor: bool) -> tuple[tuple[int, float], ...]:
    """Gradients in backward order; those that are ready at the same moment as one, unless each goes on its own."""
    gradients = models.get(model).gradients_in_backward_order()
    if every_tensor:
        return tuple(gradients)
    merged: dict[float, int] = {}
    for elements, share in gradients:
        merged[share] = merged.get(share, 0) + elements
    return tuple((elements, share) for share, elements in merged.items())


def _ring_bytes(setup: Setup, payload: float) -> float:
    """Bytes that one node sends per step."""
    ranks = setup.nodes if setup.hierarchical else setup.gpus
    return 2 * (ranks - 1) / ranks * payload


def _collective(setup: Setup, parameters: Parameters) -> tuple[float, float]:
    """Milliseconds per all-reduce and per byte."""
    n, nodes, g = setup.gpus, setup.nodes, min(setup.gpus, setup.gpus_per_node)
    intra = setup.intra_gbytes * parameters.intra * 1e6
    if nodes == 1:
        return parameters.local_launch_ms, 2 * (n - 1) / n / intra
    inter = link_gbps(setup, parameters) * 1e6 / 8
    spread = 1 + parameters.node_loss * math.log2(nodes / 2)
    if setup.hierarchical:
        ranks = nodes
        per_byte = 2 * (g - 1) / g / intra + 2 * (nodes - 1) / nodes / inter * spread
    else:
        ranks = n
        slowest = inter if g == 1 else min(intra, inter)
        per_byte = 2 * (n - 1) / n / slowest * spread
    ring = 2 * (ranks - 1) * parameters.ring_hop_ms
    tree = 2 * math.log2(ranks) * parameters.tree_hop_ms
    return parameters.launch_ms + min(ring, tree), per_byte


def _finish(
    setup: Setup, times: Sequence[float], sizes: Sequence[float], per_call: float, per_byte: float
) -> tuple[float, int]:
    """When the last gradient is reduced, and in how many all-reduces."""
    if setup.engine == "horovod" and setup.nodes > 1 and not setup.every_tensor:
        # Half a cycle passes on average before a gradient that finds the network idle is seen.
        times = [ready + setup.cycle_ms / 2 for ready in times]
    if setup.overlap == "none":
        return times[-1] + per_call + sum(sizes) * per_byte, 1
    if setup.every_tensor:
        end = 0.0
        for ready, size in zip(times, sizes, strict=True):
            end = max(end, ready) + per_call + size * per_byte
        return end, len(sizes)
    limit = 1e6 * (DEFAULT_FUSION_MB[setup.engine] if setup.fusion_mb is None else setup.fusion_mb)
    if setup.engine == "ddp":
        return _in_buckets(times, sizes, per_call, per_byte, limit)
    return _best_merge(times, sizes, per_call, per_byte, limit)


def _in_buckets(
    times: Sequence[float], sizes: Sequence[float], per_call: float, per_byte: float, limit: float
) -> tuple[float, int]:
    """Buckets that are fixed before training: each goes when its last gradient is ready."""
    end, filled, calls = 0.0, 0.0, 0
    for index, (ready, size) in enumerate(zip(times, sizes, strict=True)):
        filled += size
        if filled >= limit or index == len(sizes) - 1:
            end = max(end, ready) + per_call + filled * per_byte
            filled, calls = 0.0, calls + 1
    return end, calls


def _best_merge(
    times: Sequence[float], sizes: Sequence[float], per_call: float, per_byte: float, limit: float
) -> tuple[float, int]:
    """The merge of neighbours, none above the limit, that is done first.

    Horovod takes whatever is ready at each cycle. The best merge is what that approaches, and unlike a replay of the
    cycles it can only gain from a faster link.
    """
    ends = [0.0]
    calls = [0]
    before = [0.0]
    for size in sizes:
        before.append(before[-1] + size)
    for last, ready in enumerate(times, start=1):
        best, best_calls = math.inf, 0
        for first in range(last - 1, -1, -1):
            merged = before[last] - before[first]
            if merged > limit and first < last - 1:
                break
            done = max(ends[first], ready) + per_call + merged * per_byte
            if done < best:
                best, best_calls = done, calls[first] + 1
            if ends[first] <= ready:
                break
        ends.append(best)
        calls.append(best_calls)
    return ends[-1], calls[-1]


def _parameter_server(
    setup: Setup, parameters: Parameters, times: Sequence[float], sizes: Sequence[float]
) -> tuple[float, int, float]:
    """Push beside backward, pull beside the next forward, as layers come to need their parameters.

    A node's GPUs add up their gradients first; servers share the parameters evenly.
    """
    nodes = setup.nodes
    servers = setup.servers or nodes
    link = link_gbps(setup, parameters) * 1e6 / 8
    # With a server on every node a node keeps its own share; fewer servers carry every node's traffic.
    share = (nodes - 1) / nodes if servers >= nodes else nodes / servers
    per_byte = share / link * (1 + parameters.node_loss * math.log2(nodes / 2))
    end = 0.0
    for ready, size in zip(times, sizes, strict=True):
        end = max(end, ready) + size * per_byte
    payload = sum(sizes)
    forward = times[-1] * (1 - parameters.backward_share)
    pull = max(0.0, payload * per_byte - forward)
    return end + parameters.launch_ms + pull, len(sizes), 2 * share * payload


def _interval(setup: Setup, parameters: Parameters, step: _Step) -> tuple[float, float]:
    """Factors on the rate between which four of five measurements are expected.

    Each doubt is moved on its own and the effects are added as independent: the bandwidth, the delay of the GPUs
    (clusters lose between nothing and two and a half times the default), the single-GPU rate, and what remains.
    """
    total = step.total
    slower, faster = [setup.compute_doubt, parameters.rest], [setup.compute_doubt, parameters.rest]
    if setup.gpus > 1:
        known = parameters.fitted or (setup.transport == "tcp" and (setup.rate_gbps or 0) <= 25)
        doubt = parameters.known_doubt if known else parameters.unknown_doubt
        less, more = parameters.jitter_doubt
        slower.append(more * step.straggler / total)
        faster.append(less * step.straggler / total)
        slower.append(_simulate(setup, _scaled(parameters, 1 / doubt)).total / total - 1)
        faster.append(1 - _simulate(setup, _scaled(parameters, doubt)).total / total)
    return math.exp(-math.hypot(*slower)), math.exp(math.hypot(*faster))


def _scaled(parameters: Parameters, factor: float) -> Parameters:
    return replace(
        parameters,
        goodput=tuple((name, value * factor) for name, value in parameters.goodput),
        ceiling_gbps=tuple((name, value * factor) for name, value in parameters.ceiling_gbps),
        intra=parameters.intra * factor,
        ring_hop_ms=parameters.ring_hop_ms / factor,
        tree_hop_ms=parameters.tree_hop_ms / factor,
        launch_ms=parameters.launch_ms / factor,
        local_launch_ms=parameters.local_launch_ms / factor,
    )


def _bottleneck(setup: Setup, step: _Step) -> str:
    """What to change first: the largest loss, or compute when all of them together cost less than a tenth."""
    losses = {"network": step.exposed, "input": step.wait, "stragglers": step.straggler}
    worst = max(losses, key=lambda name: losses[name])
    if sum(losses.values()) < 0.1 * step.total:
        return "compute"
    if worst != "network":
        return worst
    if setup.nodes == 1:
        return "intra-node bandwidth"
    if step.latency > step.comm / 2:
        return "network latency"
    return "network bandwidth"


def _flag(field: str) -> str:
    names = {"input_images_per_second": "input-rate", "single_step_ms": "single-rate"}
    return "--" + names.get(field, field.replace("_", "-"))
