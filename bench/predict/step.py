"""Duration of one data-parallel training step, and its uncertainty.

A step is forward, then backward. During backward, gradients become ready in the order and at the times of the model's
table. They are merged and all-reduced one group after the other. What is not finished when backward ends is exposed.
docs/predict.md has the formulas and the source of each default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from bench.catalogue import models
from bench.predict.inputs import COMPRESSIONS, DEFAULT_FUSION_MB, DEFAULTS, SHARED_BOARD, Parameters, Setup

MIB = 1 << 20


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

    Delays come from interrupts, collisions and clocks and have an exponential tail: the largest of n is expected to be
    the n-th harmonic number. A single GPU's step already contains one mean delay.
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
    """Goodput of one node's port, Gbit/s: a share of the line rate, at most the transport's ceiling."""
    good = dict(parameters.goodput)[setup.transport]
    return min(good * setup.port_gbps, dict(parameters.ceiling_gbps)[setup.transport])


def _simulate(setup: Setup, parameters: Parameters) -> _Step:
    n, nodes = setup.gpus, setup.nodes
    if n == 1:
        return _with_input(setup, _Step(setup.single_step_ms, 0.0, 0.0, 0.0, 0.0, 0.0, None))
    compute = setup.single_step_ms / SHARED_BOARD.get(setup.gpu or "", 1.0)
    straggler = compute * parameters.jitter * expected_slowest(n)
    busy_compute = compute + straggler
    ratio, codec_ms = COMPRESSIONS[setup.compression]
    ready = _ready_groups(setup.model, setup.every_tensor)
    forward = busy_compute * (1 - parameters.backward_share)
    backward = busy_compute * parameters.backward_share
    times = [forward + share * backward for _, share in ready]
    sizes = [4 * elements * ratio for elements, _ in ready]
    payload = sum(sizes)
    if setup.engine == "ps" and nodes > 1:
        end, wire_bytes = _parameter_server(setup, parameters, times, sizes)
        moving = busy = end - times[0]
        latency, bus = parameters.launch_ms, None
    else:
        per_call, per_byte = _collective(setup, parameters)
        end, calls = _finish(setup, times, sizes, per_call, per_byte)
        moving = payload * per_byte
        latency = calls * per_call
        busy = latency + moving
        bus = 8e-6 * payload * 2 * (n - 1) / n / busy
        ranks = nodes if setup.hierarchical else n
        wire_bytes = 2 * (ranks - 1) / ranks * payload
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
    """Gradients in backward order. Those that are ready at the same time are merged, unless each is sent on its own."""
    gradients = models.get(model).gradients_in_backward_order()
    if every_tensor:
        return tuple(gradients)
    merged: dict[float, int] = {}
    for elements, share in gradients:
        merged[share] = merged.get(share, 0) + elements
    return tuple((elements, share) for share, elements in merged.items())


def _collective(setup: Setup, parameters: Parameters) -> tuple[float, float]:
    """Milliseconds per all-reduce and per byte."""
    n, nodes, g = setup.gpus, setup.nodes, min(setup.gpus, setup.gpus_per_node)
    intra = setup.intra_gbytes * parameters.intra * 1e6
    if nodes == 1:
        return parameters.local_launch_ms, 2 * (n - 1) / n / intra
    inter = link_gbps(setup, parameters) * 1e6 / 8
    spread = 1 + parameters.node_loss * math.log2(nodes / 2)
    if setup.hierarchical:
        ranks, per_byte = nodes, 2 * (g - 1) / g / intra + 2 * (nodes - 1) / nodes / inter * spread
    else:
        slowest = inter if g == 1 else min(intra, inter)
        ranks, per_byte = n, 2 * (n - 1) / n / slowest * spread
    ring = 2 * (ranks - 1) * parameters.ring_hop_ms
    tree = 2 * math.log2(ranks) * parameters.tree_hop_ms
    return parameters.launch_ms + min(ring, tree), per_byte


def _finish(
    setup: Setup, times: Sequence[float], sizes: Sequence[float], per_call: float, per_byte: float
) -> tuple[float, int]:
    """Time at which the last gradient is reduced, and the number of all-reduces."""
    if setup.engine == "horovod" and setup.nodes > 1 and not setup.every_tensor:
        # When the network is idle, a gradient waits half a cycle on average.
        times = [ready + setup.cycle_ms / 2 for ready in times]
    if setup.overlap == "none":
        return times[-1] + per_call + sum(sizes) * per_byte, 1
    if setup.every_tensor:
        return _in_buckets(times, sizes, per_call, per_byte, limit=0.0)
    limit = MIB * (DEFAULT_FUSION_MB[setup.engine] if setup.fusion_mb is None else setup.fusion_mb)
    if setup.engine == "ddp":
        return _in_buckets(times, sizes, per_call, per_byte, limit)
    return _best_merge(times, sizes, per_call, per_byte, limit)


def _in_buckets(
    times: Sequence[float], sizes: Sequence[float], per_call: float, per_byte: float, limit: float
) -> tuple[float, int]:
    """Buckets are fixed before training. Each is sent when its last gradient is ready."""
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
    """The merge of neighbours within the limit that finishes first.

    Horovod merges what is ready at each cycle, which comes close to the best merge. Unlike a replay of the cycles, the
    best merge never gets slower with a faster link.
    """
    ends, calls = [0.0], [0]
    before = list(accumulate(sizes, initial=0.0))
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
) -> tuple[float, float]:
    """Time of the last pull, and the bytes that one node sends. It pushes in backward and pulls in the next forward.

    The GPUs of a node add up their gradients first. Servers share the parameters evenly.
    """
    nodes = setup.nodes
    servers = setup.servers or nodes
    link = link_gbps(setup, parameters) * 1e6 / 8
    # With a server on every node, a node keeps its own share. Fewer servers handle the traffic of all nodes.
    share = (nodes - 1) / nodes if servers >= nodes else nodes / servers
    per_byte = share / link * (1 + parameters.node_loss * math.log2(nodes / 2))
    end, _ = _in_buckets(times, sizes, 0.0, per_byte, limit=0.0)
    payload = sum(sizes)
    forward = times[-1] * (1 - parameters.backward_share)
    pull = max(0.0, payload * per_byte - forward)
    return end + parameters.launch_ms + pull, 2 * share * payload


def _interval(setup: Setup, parameters: Parameters, step: _Step) -> tuple[float, float]:
    """Factors on the rate that bound the 80% interval.

    Each uncertainty is varied alone, and the effects are added as independent: the bandwidth, the delay of the GPUs
    (clusters lose between nothing and two and a half times the default), the single-GPU rate, and the rest.
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
    return "network latency" if step.latency > step.comm / 2 else "network bandwidth"
