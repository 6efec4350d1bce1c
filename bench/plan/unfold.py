"""Unfold a plan into points, in measuring order, and estimate how long each takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from bench.catalogue import gpu_rates, interconnect, models
from bench.plan import scale_model
from bench.plan.schema import Plan
from bench.results.trial import Point
from cluster import tuning
from cluster.core.contract import Contract, TransportName
from cluster.tuning import Tuning

Tuned = Mapping[str, Tuning]
START_SECONDS, RANK_START_SECONDS = 4.0, 0.8
STEPS = 16


@dataclass(frozen=True)
class PointGroup:
    """Points that share one start of the worker, so its start-up time counts once."""

    fabric: str
    nodes: int
    engine: str
    points: tuple[Point, ...]


def rate_of(plan: Plan, cluster: Contract | None, fabric: str) -> float:
    if fabric in plan.links:
        return plan.links[fabric].rate_gbps
    return cluster.fabrics[fabric].rate_gbps if cluster else {"1g": 1.0, "10g": 10.0, "ib": 100.0}.get(fabric, 10.0)


def transport_of(cluster: Contract | None, fabric: str) -> TransportName:
    """A link from plan.links is shaped on the active fabric and has its transport."""
    if not cluster:
        return "tcp"
    return cluster.fabrics.get(fabric, cluster.fabrics[cluster.active_fabric]).transport


def one_job(cluster: Contract | None) -> bool:
    """GPULab's mode 1xN: plan.nodes then counts the GPUs of a single job."""
    return cluster is not None and cluster.executor == "gpulab" and len(cluster.nodes) == 1


def engine_of(plan: Plan, cluster: Contract | None, engine: str, fabric: str, tuned: Tuned) -> str:
    """Resolve `horovod` for a fabric. On GPUs NCCL sends the bytes and mpirun only starts the processes."""
    if engine != "horovod":
        return engine
    return "horovod-mpi" if plan.device == "cuda" else tuning_of(cluster, fabric, tuned).engine


def tuning_of(cluster: Contract | None, fabric: str, tuned: Tuned) -> Tuning:
    """A link from plan.links has the tuning of the active fabric."""
    if not cluster:
        return Tuning()
    name = fabric if fabric in cluster.fabrics else cluster.active_fabric
    return tuning.choose(tuned, name, cluster.fabrics[name], cluster.provider)


def points(plan: Plan, cluster: Contract | None, tuned: Tuned = MappingProxyType({})) -> Iterator[PointGroup]:
    """One group per launch, ordered for early results: fabric by fabric, in the order of plan.nodes.

    Each point is there once, even if the plan names it twice: `horovod` is one of the other engines, and strong scaling
    can round two batches to the same.
    """
    seen: set[str] = set()
    for name, fabric, count, per_node in product(plan.engines, plan.fabrics, plan.nodes, plan.gpus_per_node):
        engine = engine_of(plan, cluster, name, fabric, tuned)
        nodes, gpus = (1, count * per_node) if one_job(cluster) else (count, per_node)
        inner = product(plan.data, plan.models, plan.compressions, plan.batches, range(plan.repeats))
        points = [
            Point(
                fabric=fabric,
                rate_gbps=rate_of(plan, cluster, fabric),
                nodes=nodes,
                gpus_per_node=gpus,
                batch=batch if plan.scaling == "weak" else max(1, round(batch / (nodes * gpus))),
                model=model,
                engine=engine,
                compression=compression,
                device=plan.device,
                data=data,
                repeat=repeat,
                transport=transport_of(cluster, fabric),
            )
            for data, model, compression, batch, repeat in inner
        ]
        new = {point.id: point for point in points if point.id not in seen}
        seen |= new.keys()
        if new:
            yield PointGroup(fabric, nodes, engine, tuple(new.values()))


def compute_ms(plan: Plan, point: Point) -> tuple[float, str]:
    """Compute time of one step on the plan's emulated device, and where the figure comes from."""
    given = plan.compute_ms.get(point.model) if isinstance(plan.compute_ms, dict) else plan.compute_ms
    if given is not None:
        return given, "measured, given in the plan"
    return gpu_rates.compute_ms(point.device.partition(":")[2], point.model, point.batch, plan.precision)


def slowdown(plan: Plan, point: Point) -> float:
    """t of the scale model. Images are decoded in real time, so trials with real data are not slowed."""
    if not point.device.startswith("emulated:") or plan.data != ["synthetic"]:
        return 1.0
    return plan.slowdown or scale_model.slowdown(point.nodes, point.rate_gbps, point.engine, point.gpus_per_node)


def node_gbytes(plan: Plan, point: Point) -> float | None:
    """Ring bandwidth between the emulated GPUs of a node; None if there is one GPU, or if they are not emulated."""
    kind, _, profile = point.device.partition(":")
    if kind != "emulated" or point.gpus_per_node == 1:
        return None
    return interconnect.gbytes(plan.interconnect, profile, point.gpus_per_node)


def estimate_seconds(plan: Plan, point: Point) -> float:
    """Rough time of one point. A step is compute plus the part of the ring that backward does not hide."""
    if not point.device.startswith("emulated:"):
        return plan.seconds
    compute = compute_ms(plan, point)[0] / 1000
    sent = 2 * (point.gpus - 1) / point.gpus * models.get(point.model).gradient_bytes
    ring = sent * 8 / (point.rate_gbps * 1e9) if point.nodes > 1 else sent / (1e9 * (node_gbytes(plan, point) or 1))
    step = max(compute, compute / 3 + ring * 1.2)
    return min(STEPS * step * slowdown(plan, point), plan.seconds * 1.5)


def start_seconds(point: Point) -> float:
    """Ranks of emulated devices share the cores of this machine."""
    sharing = point.gpus if point.device.startswith("emulated:") else point.nodes
    return START_SECONDS + RANK_START_SECONDS * sharing


def estimate(plan: Plan, groups: Iterable[PointGroup]) -> dict[str, float]:
    """Rough seconds per point, including its share of the launch: every rank loads torch on the same cores."""
    return {
        point.id: estimate_seconds(plan, point) + start_seconds(point) / len(group.points)
        for group in groups
        for point in group.points
    }
