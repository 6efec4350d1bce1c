"""Build the record of a trial from the worker's report. Pure functions: no clock, no files."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal

from bench.plan import asynchronous, scale_model
from bench.results.trial import (
    Breakdown,
    Emulation,
    Input,
    Interval,
    LinkEvidence,
    Point,
    Staleness,
    Steadiness,
    Timing,
    Trial,
    Weights,
)
from bench.sweep import nccl_log, transport
from bench.worker import step_statistics
from bench.worker.protocol import RankReport, Step, TrialDone

# A straggler's compute time exceeds the median of all ranks by this factor.
STRAGGLER = 1.10
total, communication = attrgetter("total"), attrgetter("communication")


def interval(values: list[float], convert: Any = lambda value: value) -> Interval:
    low, high = step_statistics.median_interval(values)
    ends = sorted((convert(low), convert(high)))
    return Interval(median=convert(statistics.median(values)), low=ends[0], high=ends[1])


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


def breakdown(ranks: list[RankReport], independent: bool = False) -> Breakdown:
    """Medians over steps of the mean over ranks.

    A step is the wait for images, compute, and the communication that compute does not hide. A rank with late images
    delays all ranks, so the data wait is the delay of the rank that ends its compute last. Independent ranks have none.
    """
    count = len(ranks[0].steps)
    parts: dict[str, list[float]] = {"compute": [], "exposed_comm": [], "straggler_wait": [], "data_wait": []}
    for i in range(count):
        steps = [rank.steps[i] for rank in ranks]
        mean = sum(step.compute for step in steps) / len(steps)
        longest = mean if independent else max(step.compute for step in steps)
        waits = [step.compute + step.data_wait for step in steps]
        ready = sum(waits) / len(waits) if independent else max(waits)
        parts["compute"].append(mean)
        parts["straggler_wait"].append(longest - mean)
        parts["data_wait"].append(ready - longest)
        parts["exposed_comm"].append(sum(step.total for step in steps) / len(steps) - ready)
    return Breakdown(**{key: max(0.0, statistics.median(values)) * 1e3 for key, values in parts.items()})


def stragglers(ranks: list[RankReport]) -> list[str]:
    medians = [statistics.median(step.compute for step in rank.steps) for rank in ranks]
    limit = STRAGGLER * statistics.median(medians)
    return [f"{rank.node}/{rank.local_rank}" for rank, own in zip(ranks, medians, strict=True) if own > limit]


def steadiness(ranks: list[RankReport]) -> Steadiness | None:
    """None with too few steps."""
    steps = slowest(ranks, total)
    drift, halves = step_statistics.drift(steps), step_statistics.halves(steps)
    if drift is None or halves is None:
        return None
    clocks = {f"{rank.node}/{rank.local_rank}": rank.clocks_mhz for rank in ranks if rank.clocks_mhz}
    return Steadiness(drift=drift, spread=[step_statistics.spread(half) for half in halves], clocks_mhz=clocks)


def weights(point: Point, main: TrialDone, moving_rate: float | None) -> Weights:
    """How the ranks exchanged weights, and on how old weights they computed."""
    counts: Counter[int] = Counter()
    for rank in main.ranks:
        counts.update({int(updates): count for updates, count in rank.staleness.items()})
    rate = moving_rate if point.engine == "easgd" else None
    return Weights(period=main.period, moving_rate=rate, staleness=staleness(counts))


def staleness(counts: Counter[int]) -> Staleness | None:
    """None where no update was counted: local SGD averages the weights of all ranks at once."""
    if not counts:
        return None
    ordered = sorted(counts.elements())
    return Staleness(
        mean=statistics.fmean(ordered),
        median=statistics.median(ordered),
        p95=float(ordered[math.ceil(0.95 * len(ordered)) - 1]),
        largest=ordered[-1],
        updates=len(ordered),
    )


def divergence(ranks: list[RankReport]) -> str | None:
    """The error of a training whose loss is not a number: its steps do not compute what a training computes."""
    found = [(rank.not_finite, f"{rank.node}/{rank.local_rank}") for rank in ranks if rank.not_finite is not None]
    if not found:
        return None
    step, rank = min(found)
    return f"the loss is NaN or infinite from step {step} on ({rank}); use precision fp32, or check the data"


def whole_periods(event: TrialDone) -> TrialDone:
    """Steps as means from one exchange of weights to the next: only one of them waits for the network."""
    if event.period == 1:
        return event

    def mean(rank: RankReport) -> list[Step]:
        parts = zip(*(dataclasses.astuple(step) for step in rank.steps), strict=True)
        return [
            Step(*one) for one in zip(*(step_statistics.windows(list(p), event.period) for p in parts), strict=True)
        ]

    ranks = [dataclasses.replace(rank, steps=mean(rank)) for rank in event.ranks]
    return dataclasses.replace(event, ranks=ranks)


def step_times(ranks: list[RankReport], independent: bool) -> list[float]:
    return step_statistics.over_ranks([[step.total for step in rank.steps] for rank in ranks], independent)


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
    algorithm: str = "ring",
    node_gbytes: float | None = None,
    moving_rate: float | None = None,
    split_bytes: float | None = None,
) -> Trial:
    independent, measured = point.engine in asynchronous.ENGINES, len(main.ranks[0].steps)
    main, check = whole_periods(main), check and whole_periods(check)
    steps = step_times(main.ranks, independent)
    images = point.batch * point.gpus
    traffic, problem = transport.proof(point, main, check, interface, algorithm, nccl, split_bytes)
    problem = divergence(main.ranks) or problem
    emulation = None
    if compute:
        emulation = Emulation(
            profile=point.device.partition(":")[2],
            profile_source=compute[1],
            compute_ms=compute[0],
            scale=main.scale,
            slowdown=main.slowdown,
            node_gbytes=node_gbytes,
        )
    if check and emulation:
        ratio = statistics.median(step_times(check.ranks, independent)) / statistics.median(steps)
        found = {"check_scale": check.scale, "check_ratio": ratio, "converged": scale_model.converged(ratio)}
        emulation = emulation.model_copy(update=found)
    sent = transport.payload(point, main.scale, traffic.algorithms, main.period, split_bytes) * main.scale * 8 / 1e9
    bus = interval(slowest(main.ranks, communication), lambda value: sent / value) if point.nodes > 1 else None
    runs = [main, check] if check else [main]
    spent = {"warmup": sum(run.warmup_s for run in runs), "measure": sum(run.measure_s for run in runs)}
    return Trial(
        id=point.id,
        point=point,
        status="failed" if problem else "ok",
        error=problem,
        kind=kind_of(point),
        started=started,
        steps=measured,
        step_ms=interval(steps, lambda value: value * 1e3),
        images_per_second=interval(steps, lambda value: images / value),
        breakdown_ms=breakdown(main.ranks, independent),
        bus_bandwidth_gbps=bus,
        link_gbps=link.share * point.rate_gbps if link and link.counts_for(point) else None,
        link=link if link and link.fabric == point.fabric else None,
        emulation=emulation,
        input=pipeline(main.ranks),
        traffic=traffic,
        # Stages of a pipeline have unequal work by design.
        stragglers=[] if point.engine == "pipeline" else stragglers(main.ranks),
        host_cpu_percent=main.cpu_percent,
        precision=main.precision if point.device == "cuda" else None,
        steadiness=steadiness(main.ranks) if point.device == "cuda" else None,
        loss=[*main.losses],
        weights=weights(point, main, moving_rate) if independent else None,
        timing=Timing(launch=launch_s, **spent),
    )


def kind_of(point: Point) -> Literal["emulated", "cpu", "cuda"]:
    kind = point.device.partition(":")[0]
    return "cuda" if kind == "cuda" else "cpu" if kind == "cpu" else "emulated"


def failure(point: Point, error: str, node: str | None, started: str, log: str | None) -> Trial:
    given = {"id": point.id, "point": point.model_dump(), "kind": kind_of(point), "started": started, "log": log}
    return Trial.model_validate({**given, "status": "failed", "error": error, "error_node": node})
