"""A step of training that is split otherwise than by data alone: sharded weights, pipelines, tensors and tiles.

All process the same samples per step as data parallelism does: --batch times the number of GPUs. Milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.catalogue import gpu_rates, units
from bench.plan import programs, split_engines, stages
from bench.plan.stages import Stage
from bench.predict import memory, network
from bench.predict.inputs import HALF_PRECISION, Parameters, Setup
from bench.predict.simulate import expected_slowest, simulate
from cluster.core.errors import UserError

METHODS = ("data", "fsdp", "pipeline", "tensor", "spatial")


@dataclass(frozen=True)
class Split:
    """One way to train: its step, what a device sends per step (mean), and what it holds."""

    method: str
    step_ms: float
    compute_ms: float
    sent_bytes: float
    memory_gb: float

    def samples_per_second(self, setup: Setup) -> float:
        return 1000 * setup.images_per_step / self.step_ms


@dataclass(frozen=True)
class Pipeline(Split):
    cut: tuple[Stage, ...]
    schedule: str
    micro_batches: int
    micro_batch: int
    bubble: float  # share of the pipeline's time in which the mean stage waits
    stage_ms: tuple[float, ...]  # forward and backward of one micro-batch
    edge_ms: tuple[float, ...]  # of one micro-batch in one direction
    stage_gb: tuple[float, ...]


def element_bytes(setup: Setup) -> int:
    """Of an activation on the wire."""
    return 2 if setup.precision in HALF_PRECISION else 4


def state_bytes(setup: Setup, optimizer: str) -> float:
    """Weight, gradient and the optimizer's values of one parameter."""
    return 4 * (2 + memory.OPTIMIZERS[optimizer]) + (2 if setup.precision in HALF_PRECISION else 0)


def slowest(setup: Setup, parameters: Parameters, compute: float) -> float:
    """With the delay of the slowest of all GPUs."""
    jitter = parameters.jitter * (parameters.half_jitter if setup.precision in HALF_PRECISION else 1.0)
    return compute * (1 + jitter * expected_slowest(setup.gpus))


def link_ms(setup: Setup, parameters: Parameters, across: bool = True) -> float:
    """Milliseconds per byte out of a device to its neighbour, on another node or on its own."""
    path = network.outside if across and setup.nodes > 1 else network.inside
    return 1e-6 / path(setup, parameters).gbytes


def ring_ms(setup: Setup, parameters: Parameters) -> tuple[float, float]:
    """Milliseconds per all-reduce, and per byte of it."""
    if setup.gpus == 1:
        return 0.0, 0.0
    found = network.collective(setup, parameters)
    return found.per_call, found.per_byte


def data(setup: Setup, parameters: Parameters, optimizer: str = "sgd") -> Split:
    step = simulate(setup, parameters)
    sent = 2 * (setup.gpus - 1) / setup.gpus * setup.gradient_bytes * setup.network.parameters
    return Split("data", step.total, step.compute, sent, memory.needed_gb(setup, optimizer))


def fsdp(setup: Setup, parameters: Parameters, optimizer: str = "sgd") -> Split:
    """Every device holds a share of each unit. A unit's weights are gathered before forward and again before backward.

    The weights of the next unit are gathered while this one computes; its gradients are reduced and scattered after.
    """
    parts, n = units.of(setup.model, setup.seq_len), setup.gpus
    compute = slowest(setup, parameters, setup.single_step_ms)
    call, per_byte = ring_ms(setup, parameters)
    # An all-reduce is a reduce-scatter and an all-gather.
    move = [(call + per_byte * setup.gradient_bytes * unit.parameters) / 2 for unit in parts]
    share = [unit.macs / setup.network.macs for unit in parts]
    forward = [compute * (1 - parameters.backward_share) * one for one in share]
    backward = [compute * parameters.backward_share * one for one in share]
    end = sharded_ms(forward, backward, move)
    values = state_bytes(setup, optimizer) * setup.network.parameters / n
    whole = 4 * 2 * max(unit.parameters for unit in parts)
    kept = setup.batch * memory.activation_bytes(setup.network, setup.precision in HALF_PRECISION)
    sent = 3 * (n - 1) / n * setup.gradient_bytes * setup.network.parameters
    return Split("fsdp", end, compute, sent, (values + whole + kept) / 1e9)


def sharded_ms(forward: Sequence[float], backward: Sequence[float], move: Sequence[float]) -> float:
    """The device computes unit after unit; the link gathers one unit ahead, and scatters in the order of backward."""
    device = link = 0.0
    gathered = move[0]
    link = gathered
    for at, work in enumerate(forward):
        start = max(device, gathered)
        if at + 1 < len(forward):
            link = gathered = max(link, start) + move[at + 1]
        device = start + work
    # The last unit's weights are still there when backward begins with it.
    gathered = device
    for at in reversed(range(len(backward))):
        start = max(device, gathered)
        if at > 0:
            link = gathered = max(link, start) + move[at - 1]
        device = start + backward[at]
        link = max(link, device) + move[at]
    return max(device, link)


def micro_step_ms(setup: Setup, samples: float) -> float:
    """A step of one GPU at another batch: published rates at that batch, or the usual fixed cost of a step."""
    fixed = gpu_rates.HALF_BATCH
    if setup.gpu is not None and samples >= 1 and setup.compute_doubt >= 0.05:
        try:
            args = (setup.gpu, setup.model)
            usual = gpu_rates.compute_ms(*args, setup.batch, setup.precision, setup.seq_len)[0]
            ours = gpu_rates.compute_ms(*args, max(1, round(samples)), setup.precision, setup.seq_len)[0]
            return setup.single_step_ms * ours / usual
        except UserError:
            pass
    return setup.single_step_ms * (samples + fixed) / (setup.batch + fixed)


def pipeline(
    setup: Setup,
    parameters: Parameters,
    optimizer: str = "sgd",
    depth: int | None = None,
    count: int | None = None,
    schedule: str = "1f1b",
    memory_gb: float | None = None,
) -> Pipeline:
    """Stages one behind the other, and replicas of this pipeline if there are more GPUs than stages."""
    deep = depth or setup.gpus
    if setup.gpus % deep:
        raise UserError(f"--stages: {deep} does not divide --devices {setup.gpus}")
    replicas = setup.gpus // deep
    samples = setup.images_per_step // replicas
    pieces = count or stages.micro_batches(deep, samples)
    if samples % pieces:
        raise UserError(f"--micro-batches: {pieces} does not divide the {samples} samples of a pipeline's step")
    piece = samples // pieces
    size = element_bytes(setup)
    whole = slowest(setup, parameters, micro_step_ms(setup, piece))
    held = [memory.unit_bytes(setup, unit) for unit in units.of(setup.model, setup.seq_len)]
    each = state_bytes(setup, optimizer)

    def needed(position: int, first: int, last: int) -> float:
        parts = stages.stage(setup.model, setup.seq_len, first, last)
        waiting = stages.kept(schedule, position, deep, pieces)
        return (each * parts.parameters + waiting * piece * sum(held[first:last])) / 1e9

    def fits(position: int, first: int, last: int) -> bool:
        return memory_gb is None or needed(position, first, last) <= memory_gb

    def each_ms(cut: Sequence[Stage]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Work of the stages, and transfers between them, for one micro-batch."""
        # Stages follow each other inside a node first.
        edges = tuple(
            parameters.ring_hop_ms
            + part.sends * piece * size * link_ms(setup, parameters, (at + 1) % setup.gpus_per_node == 0)
            for at, part in enumerate(cut[:-1])
        )
        return tuple(part.share * whole for part in cut), edges

    def step_ms(cut: Sequence[Stage]) -> float:
        played = stages.pipeline_ms(*each_ms(cut), schedule, pieces, parameters.backward_share)
        return played + sums(setup, parameters, cut, replicas)[0]

    found = stages.fastest_cut(setup.model, deep, setup.seq_len, step_ms, fits)
    work, edges = each_ms(found)
    time = stages.pipeline_ms(work, edges, schedule, pieces, parameters.backward_share)
    idle = 1 - sum(work) * pieces / deep / time
    exposed, sent = sums(setup, parameters, found, replicas)
    crossing = sum(part.sends for part in found) * 2 * samples * size / deep
    memories = tuple(needed(at, part.first, part.last) for at, part in enumerate(found))
    compute = sum(work) * pieces / deep
    common = ("pipeline", time + exposed, compute, crossing + sent, max(memories))
    return Pipeline(*common, found, schedule, pieces, piece, idle, work, edges, memories)


def sums(setup: Setup, parameters: Parameters, cut: Sequence[Stage], replicas: int) -> tuple[float, float]:
    """Milliseconds and bytes per device of the sums after the last micro-batch: over replicas, and of shared tables."""
    time = sent = 0.0
    per_byte = link_ms(setup, parameters)
    for part in cut:
        size = setup.gradient_bytes * part.parameters
        factor = 2 * (replicas - 1) / replicas
        shared = setup.gradient_bytes * part.shares_parameters if len(cut) > 1 else 0.0
        calls = (2 * (replicas - 1) + (2 if shared else 0)) * parameters.ring_hop_ms
        time = max(time, (factor * size + shared) * per_byte + calls)
        sent += (factor * size + shared) / len(cut)
    return time, sent


def tensor(setup: Setup, parameters: Parameters, optimizer: str = "sgd") -> Split:
    """Linear layers split over all devices. A CNN's convolutions stay data-parallel, their outputs are exchanged."""
    split_engines.check_tensor(setup.model, setup.gpus, "--model")
    n, size = setup.gpus, element_bytes(setup)
    call, per_byte = ring_ms(setup, parameters)
    compute = slowest(setup, parameters, setup.single_step_ms)
    samples = setup.images_per_step
    kept = memory.activation_bytes(setup.network, setup.precision in HALF_PRECISION) * setup.batch
    each = state_bytes(setup, optimizer)
    form = units.size_of(setup.network)
    if form is not None:
        state = form.hidden * (setup.network.tokens or form.positions) * samples * size
        calls = 4 * form.blocks + 2
        moved = calls * state
        own = each * setup.network.parameters / n
        sent = 2 * (n - 1) / n * moved
        return Split("tensor", compute + calls * call + moved * per_byte, compute, sent, (own + kept) / 1e9)
    large = programs.large_linears(units.of(setup.model))
    # Gathered and scattered once forward and once backward; each is half an all-reduce of all samples.
    moved = sum(unit.inputs for unit in large[:1]) + sum(unit.outputs for unit in large[-1:])
    exchanged = moved * samples * size
    split = sum(unit.parameters for unit in large)
    rest = setup.network.parameters - split
    gradients = setup.gradient_bytes * rest
    behind = compute * parameters.backward_share
    exposed = max(0.0, call + gradients * per_byte - behind)
    time = compute + exposed + 2 * call + exchanged * per_byte
    sent = 2 * (n - 1) / n * gradients + 2 * (n - 1) / n * exchanged
    return Split("tensor", time, compute, sent, (each * (rest + split / n) + kept) / 1e9)


def spatial(setup: Setup, parameters: Parameters, optimizer: str = "sgd") -> Split:
    """Tiles of rows. Every convolution needs rows of the neighbours, and so does its backward pass."""
    split_engines.check_spatial(setup.model, setup.gpus, "--model")
    n, size = setup.gpus, element_bytes(setup)
    call, per_byte = ring_ms(setup, parameters)
    parts = units.of(setup.model)
    tiles = programs.tiled(parts)
    tiled, behind = parts[:tiles], parts[tiles:]
    halo = sum(unit.halo for unit in tiled[1:]) * setup.images_per_step * size
    gathered = behind[0].inputs * setup.images_per_step * size
    again = sum(unit.macs for unit in behind) / setup.network.macs * (n - 1)
    compute = slowest(setup, parameters, setup.single_step_ms * (1 + again))
    gradients = setup.gradient_bytes * sum(unit.parameters for unit in tiled)
    exposed = max(0.0, call + gradients * per_byte - compute * parameters.backward_share)
    # A device between two others sends half of the rows of each of its two cuts, forward and backward.
    cuts = min(n - 1, 2)
    exposed += halo * cuts * link_ms(setup, parameters) + (call + gathered * per_byte) / 2
    exposed += 2 * cuts * sum(1 for unit in tiled[1:] if unit.halo) * parameters.ring_hop_ms
    sent = (2 * halo + gathered + 2 * gradients) * (n - 1) / n
    return Split("spatial", compute + exposed, compute, sent, memory.needed_gb(setup, optimizer))


def ways(setup: Setup, parameters: Parameters, optimizer: str = "sgd", **options: object) -> list[Split]:
    """Every method that fits the network, data parallelism first. options: of the pipeline."""
    found: list[Split] = [data(setup, parameters, optimizer), fsdp(setup, parameters, optimizer)]
    found.append(pipeline(setup, parameters, optimizer, **options))  # type: ignore[arg-type]
    for method in (tensor, spatial):
        try:
            found.append(method(setup, parameters, optimizer))
        except UserError:
            continue
    return found


def at_rate(setup: Setup, gbps: float) -> Setup:
    return replace(setup, rate_gbps=gbps, rate_unknown=False)


def idle_share(deep: int, pieces: int) -> float:
    """The bubble of a balanced pipeline without transfers."""
    return (deep - 1) / (pieces + deep - 1) if deep > 1 else 0.0
