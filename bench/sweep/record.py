"""Build the record of a trial from the worker's report. Pure functions: no clock, no files."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any, Literal
from urllib.parse import urlsplit

from bench.catalogue import models
from bench.plan import scale_model
from bench.results.trial import Breakdown, Emulation, Input, Interval, LinkEvidence, Point, Timing, Traffic, Trial
from bench.sweep import nccl_log
from bench.worker import step_statistics
from bench.worker.protocol import RankReport, Step, TrialDone, one_bit_bytes

# Ethernet, IP and TCP headers with timestamps: a frame of 1514 bytes has 1448 bytes of payload.
WIRE_OVERHEAD = 1514 / 1448
TOLERANCE = 0.15
# A straggler's compute time exceeds the median of all ranks by this factor.
STRAGGLER = 1.10
total, communication = attrgetter("total"), attrgetter("communication")


def interval(values: list[float], convert: Any = lambda value: value) -> Interval:
    low, high = step_statistics.median_interval(values)
    ends = sorted((convert(low), convert(high)))
    return Interval(median=convert(statistics.median(values)), low=ends[0], high=ends[1])


def ring_bytes(point: Point, factor: float) -> float:
    """Payload that each node must send per step, mean over nodes. Gradients are reduced inside a node first.

    A ring and a parameter server with a share on every node send the same bytes. Single bits go from all to all.
    """
    sizes = [max(1, round(n / factor)) for n, _ in models.get(point.model).gradients_in_backward_order()]
    if point.compression == "1bit":
        return (point.nodes - 1) * point.gpus_per_node * float(sum(map(one_bit_bytes, sizes)))
    return 2 * (point.nodes - 1) / point.nodes * sum(sizes) * (2 if point.compression == "fp16" else 4)


def sent_by_node(event: TrialDone) -> dict[str, dict[str, float]]:
    """node -> interface -> bytes per step."""
    return {rank.node: rank.sent for rank in reversed(event.ranks) if rank.local_rank == 0}


def mean_sent(event: TrialDone, interface: str) -> float:
    nodes = sent_by_node(event)
    return sum(sent.get(interface, 0.0) for sent in nodes.values()) / len(nodes)


def fixed_bytes(main: TrialDone, check: TrialDone | None, interface: str) -> float:
    """Bytes per node and step that do not shrink with the scale factor: Horovod's negotiation and packet headers.

    At twice the scale factor half as many gradient bytes are sent, and the same fixed bytes.
    """
    if not check:
        return 0.0
    ratio = check.scale / main.scale
    return float(max(0.0, (ratio * mean_sent(check, interface) - mean_sent(main, interface)) / (ratio - 1)))


def proof(point: Point, main: TrialDone, check: TrialDone | None, interface: str) -> tuple[Traffic, str | None]:
    """Bytes per interface, and the error if they did not go over the fabric."""
    by_node = sent_by_node(main)
    expected = (ring_bytes(point, main.scale) + served_bytes(point, main.ranks)) * WIRE_OVERHEAD
    fixed = fixed_bytes(main, check, interface)
    traffic = Traffic(
        interface=interface,
        expected_bytes=expected,
        fixed_bytes=fixed,
        measured_bytes={node: sent.get(interface, 0.0) for node, sent in by_node.items()},
        other_bytes={node: {nic: n for nic, n in sent.items() if nic != interface} for node, sent in by_node.items()},
    )
    if point.nodes == 1:
        return traffic, None
    total = mean_sent(main, interface)
    for node, others in traffic.other_bytes.items():
        for nic, sent in others.items():
            if sent > 0.5 * expected:
                return traffic, f"traffic went over {nic} on {node}, not over {interface}"
    if not (1 - TOLERANCE) * expected <= total <= (1 + TOLERANCE) * (expected + fixed):
        wanted = f"{expected / 1e6:.2f} MB plus {fixed / 1e6:.2f} MB of negotiation, within {TOLERANCE:.0%}"
        return traffic, f"{interface} sent {total / 1e6:.2f} MB per node and step, expected {wanted}"
    return traffic, None


def excess(point: Point, traffic: Traffic) -> str | None:
    """The node that sent more than its gradients need, if one did.

    Negotiation may explain it. So may other traffic: it does not halve at twice the scale factor either.
    """
    if point.nodes == 1 or point.data != "synthetic":
        return None
    node, sent = max(traffic.measured_bytes.items(), key=itemgetter(1))
    if sent <= (1 + TOLERANCE) * traffic.expected_bytes:
        return None
    needed = traffic.expected_bytes / 1e6
    return f"{traffic.interface} on {node} sent {sent / 1e6:.2f} MB per step, its gradients need {needed:.2f} MB"


def served_bytes(point: Point, ranks: list[RankReport]) -> float:
    """Bytes of shards per node and step, if a node of the cluster serves them to the others."""
    server = urlsplit(point.data.partition(":")[2]).hostname
    if server not in {rank.node for rank in ranks}:
        return 0.0
    sent = sum(rank.input.read_bytes for rank in ranks if rank.input and rank.node != server)
    return float(sent / len(ranks[0].steps) / point.nodes)


def pipeline(ranks: list[RankReport]) -> Input | None:
    """Capacity and load of the ranks' input pipelines."""
    inputs = [rank.input for rank in ranks if rank.input]
    if not inputs:
        return None
    skipped: dict[str, int] = {}
    for each in inputs:
        for kind, count in each.skipped.items():
            skipped[kind] = skipped.get(kind, 0) + count
    return Input(
        cores=inputs[0].cores,
        decode_busy=sum(min(1.0, each.decode_s / each.cores / each.elapsed_s) for each in inputs) / len(inputs),
        decode_images_per_second=sum(i.cores * i.decoded / i.decode_s for i in inputs if i.decode_s > 0),
        read_mb_per_second=sum(i.read_bytes / i.read_s / 1e6 for i in inputs if i.read_s > 0),
        reused=inputs[0].reused,
        skipped=skipped,
        examples=[text for each in inputs for text in each.examples][:20],
    )


def breakdown(ranks: list[RankReport]) -> Breakdown:
    """Medians over steps of the mean over ranks.

    A step is the wait for images, compute, and the communication that compute does not hide. A rank with late images
    delays all ranks, so the data wait is the delay of the rank that ends its compute last.
    """
    count = len(ranks[0].steps)
    parts: dict[str, list[float]] = {"compute": [], "exposed_comm": [], "straggler_wait": [], "data_wait": []}
    for i in range(count):
        steps = [rank.steps[i] for rank in ranks]
        longest = max(step.compute for step in steps)
        ready = max(step.compute + step.data_wait for step in steps)
        mean = sum(step.compute for step in steps) / len(steps)
        parts["compute"].append(mean)
        parts["straggler_wait"].append(longest - mean)
        parts["data_wait"].append(ready - longest)
        parts["exposed_comm"].append(sum(step.total for step in steps) / len(steps) - ready)
    return Breakdown(**{key: max(0.0, statistics.median(values)) * 1e3 for key, values in parts.items()})


def stragglers(ranks: list[RankReport]) -> list[str]:
    medians = [statistics.median(step.compute for step in rank.steps) for rank in ranks]
    limit = STRAGGLER * statistics.median(medians)
    return [f"{rank.node}/{rank.local_rank}" for rank, own in zip(ranks, medians, strict=True) if own > limit]


def slowest(ranks: list[RankReport], part: Callable[[Step], float]) -> list[float]:
    """Longest time of a part over all ranks, per step."""
    return [max(map(part, steps)) for steps in zip(*(rank.steps for rank in ranks), strict=True)]


def trial(
    point: Point,
    main: TrialDone,
    check: TrialDone | None,
    compute: tuple[float, str] | None,
    interface: str,
    launch_s: float,
    started: str,
    link: LinkEvidence | None = None,
    nccl: nccl_log.Log | None = None,
) -> Trial:
    steps = slowest(main.ranks, total)
    images = point.batch * point.gpus
    traffic, problem = proof(point, main, check, interface)
    if nccl:
        traffic = traffic.model_copy(update={"nccl": nccl.networks})
        problem = nccl.problem() or problem
    emulation = None
    if compute:
        emulation = Emulation(
            profile=point.device.partition(":")[2],
            profile_source=compute[1],
            compute_ms=compute[0],
            scale=main.scale,
            slowdown=main.slowdown,
        )
    if check and emulation:
        ratio = statistics.median(slowest(check.ranks, total)) / statistics.median(steps)
        found = {"check_scale": check.scale, "check_ratio": ratio, "converged": scale_model.converged(ratio)}
        emulation = emulation.model_copy(update=found)
    ring = ring_bytes(point, main.scale) * main.scale * 8 / 1e9
    bus = interval(slowest(main.ranks, communication), lambda value: ring / value) if point.nodes > 1 else None
    runs = [main, check] if check else [main]
    spent = {"warmup": sum(run.warmup_s for run in runs), "measure": sum(run.measure_s for run in runs)}
    return Trial(
        id=point.id,
        point=point,
        status="failed" if problem else "ok",
        error=problem,
        kind=kind_of(point),
        started=started,
        steps=len(steps),
        step_ms=interval(steps, lambda value: value * 1e3),
        images_per_second=interval(steps, lambda value: images / value),
        breakdown_ms=breakdown(main.ranks),
        bus_bandwidth_gbps=bus,
        link_gbps=link.share * point.rate_gbps if link and link.counts_for(point) else None,
        link=link if link and link.fabric == point.fabric else None,
        emulation=emulation,
        input=pipeline(main.ranks),
        traffic=traffic,
        stragglers=stragglers(main.ranks),
        host_cpu_percent=main.cpu_percent,
        loss=[*main.losses],
        timing=Timing(launch=launch_s, **spent),
    )


def kind_of(point: Point) -> Literal["emulated", "cpu", "cuda"]:
    kind = point.device.partition(":")[0]
    return "cuda" if kind == "cuda" else "cpu" if kind == "cpu" else "emulated"


def failure(point: Point, error: str, node: str | None, started: str, log: str | None) -> Trial:
    given = {"id": point.id, "point": point.model_dump(), "kind": kind_of(point), "started": started, "log": log}
    return Trial.model_validate({**given, "status": "failed", "error": error, "error_node": node})
