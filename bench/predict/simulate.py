"""The parts of one data-parallel training step.

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

from bench.catalogue import gpu_rates, models
from bench.predict import network, peers, servers
from bench.predict.inputs import COMPRESSIONS, DEFAULT_FUSION_MB, HALF_PRECISION, SHARED_BOARD, Parameters, Setup

MIB = 1 << 20


@dataclass(frozen=True)
class Step:
    """Milliseconds. `limit` names what slows the communication."""

    compute: float
    straggler: float
    exposed: float
    wait: float
    comm: float
    latency: float
    bus_gbps: float | None
    limit: str

    @property
    def total(self) -> float:
        return self.compute + self.straggler + self.exposed + self.wait


def expected_slowest(count: int) -> float:
    """How far the slowest of `count` GPUs lags behind one, in mean delays.

    Delays come from interrupts, collisions and clocks and have an exponential tail: the largest of n is expected to be
    the n-th harmonic number. A single GPU's step already contains one mean delay.
    """
    return sum(1 / k for k in range(2, count + 1)) if count < 64 else math.log(count) + 0.5772 + 0.5 / count - 1


def simulate(setup: Setup, parameters: Parameters) -> Step:
    n, nodes = setup.gpus, setup.nodes
    micro, steps = setup.single_step_ms, setup.grad_accum
    if n == 1:
        return _with_input(setup, Step(micro * steps, 0.0, 0.0, 0.0, 0.0, 0.0, None, "compute"))
    shared = min(n, setup.gpus_per_node) > 1
    board = SHARED_BOARD.get(gpu_rates.canonical(setup.gpu or ""), 1.0) if shared else 1.0
    compute = micro * steps / board
    jitter = parameters.jitter * (parameters.half_jitter if setup.precision in HALF_PRECISION else 1.0)
    # Delays of several micro-batches average out.
    straggler = compute * jitter * expected_slowest(n) / math.sqrt(steps)
    if setup.engine in peers.INDEPENDENT:
        straggler = 0.0
    elif setup.engine == "local-sgd":
        straggler /= math.sqrt(setup.period)
    busy_compute = compute + straggler
    ratio, codec_ms = COMPRESSIONS[setup.compression]
    element = min(setup.gradient_bytes, 4 * ratio)
    ready = _ready_groups(setup.model, setup.seq_len, setup.every_tensor)
    # Gradients leave in the last micro-batch only.
    last = busy_compute / steps
    forward, backward = last * (1 - parameters.backward_share), last * parameters.backward_share
    start = busy_compute - backward
    times = [start + share * backward for _, share in ready]
    sizes = [element * elements for elements, _ in ready]
    payload = sum(sizes)
    if setup.engine in peers.ENGINES or setup.placement == "nodes":
        whenever = [times[-1]] * len(times) if setup.overlap == "none" else times
        sent = peers.exchange(setup, parameters, whenever, sizes)
        end, limit, wire_bytes = sent.end, sent.limit, sent.wire_bytes
        moving = busy = max(0.0, end - (times[-1] if setup.engine in peers.PERIODIC else times[0]))
        latency, bus = parameters.launch_ms, None
    elif setup.engine == "ps":
        end, traffic = servers.finish(setup, parameters, times, sizes, forward)
        moving = busy = max(0.0, end - times[0])
        latency, bus, limit = parameters.launch_ms, None, traffic.limit
        wire_bytes = traffic.wire_share * payload
    else:
        found = network.collective(setup, parameters)
        end, calls = _finish(setup, times, sizes, found.per_call, found.per_byte)
        moving = payload * found.per_byte
        latency = calls * found.per_call
        busy = latency + moving
        bus = 8e-6 * payload * 2 * (n - 1) / n / busy
        ranks = nodes if setup.hierarchical else n
        wire_bytes = 2 * (ranks - 1) / ranks * payload
        limit = "latency" if latency > busy / 2 else found.limit
    exposed = max(0.0, end - busy_compute)
    exposed += parameters.interference * max(0.0, moving - exposed)
    if codec_ms and setup.gradient_bytes > 4 * ratio:
        exposed += codec_ms * setup.network.gradient_tensors
    if nodes > 1 and setup.rate_gbps is not None:
        good = dict(parameters.goodput)[setup.transport] * setup.nics
        sustained = wire_bytes * 8e-6 / (setup.rate_gbps * good)
        exposed = max(exposed, sustained - busy_compute)
        busy = max(busy, sustained)
    return _with_input(setup, Step(compute, straggler, exposed, 0.0, busy, latency, bus, limit))


def _with_input(setup: Setup, step: Step) -> Step:
    if setup.input_images_per_second is None:
        return step
    on_a_node = min(setup.gpus, setup.gpus_per_node)
    least = 1000 * setup.batch * setup.grad_accum * on_a_node / setup.input_images_per_second
    return replace(step, wait=max(0.0, least - step.total))


@lru_cache(maxsize=64)
def _ready_groups(model: str, seq_len: int | None, every_tensor: bool) -> tuple[tuple[int, float], ...]:
    """Gradients in backward order. Those that are ready at the same time are merged, unless each is sent on its own."""
    gradients = models.get(model, seq_len).gradients_in_backward_order()
    if every_tensor:
        return tuple(gradients)
    merged: dict[float, int] = {}
    for elements, share in gradients:
        merged[share] = merged.get(share, 0) + elements
    return tuple((elements, share) for share, elements in merged.items())


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
