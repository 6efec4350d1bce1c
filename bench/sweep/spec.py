"""Build the worker's spec from groups of points: trials with the factors of the scale model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from bench.catalogue import models
from bench.plan import asynchronous, scale_model, split_engines, unfold
from bench.plan.schema import Plan
from bench.plan.unfold import PointGroup
from bench.results.settings import differences as settings_differences
from bench.results.trial import Point, Settings, Trial
from bench.sweep import transport
from bench.worker.protocol import Gradient, InputSpec, LaunchSpec, TrialSpec
from cluster.tuning import Tuning


@dataclass(frozen=True)
class Scaling:
    """The scale model's factors: bytes and rate are divided by scale, time runs slower by slowdown."""

    scale: float = 1.0
    slowdown: float = 1.0


def settings_of(plan: Plan, point: Point, tuned: Tuning) -> Settings:
    """What a trial records beside its point. The tuned engine is in the point; small messages are not sent here."""
    link = plan.links.get(point.fabric)
    training: dict[str, bool | float | str] = {}
    if plan.device == "cuda":
        training = {"precision": plan.precision or "fp32", "channels_last": plan.channels_last}
    if point.engine in asynchronous.PERIODIC:
        training |= {"period": plan.period}
    if point.engine == "easgd":
        training |= {"moving_rate": asynchronous.moving_rate(plan, point)}
    names = ("data_loader", "data_cores", "data_policy", "data_strict")
    return Settings(
        launcher=plan.launcher,
        container=plan.container,
        seconds=plan.seconds,
        burst_ms=link.burst_ms if link else None,
        tuning=tuned.model_dump(exclude={"engine", "small_below_bytes"}),
        training=training,
        split=split_engines.settings(plan, point),
        loader={} if point.data == "synthetic" else {name: getattr(plan, name) for name in names},
    )


def other_settings(
    trial: Trial, settings: Settings, compute_ms: float | None, scaling: Scaling, node_gbytes: float | None = None
) -> list[str]:
    """Under which settings a trial was measured, where they are not those of this sweep."""
    then: dict[str, float | None] = {}
    if trial.emulation:
        then = {name: getattr(trial.emulation, name) for name in ("compute_ms", "slowdown", "scale", "node_gbytes")}
    now = {"compute_ms": compute_ms, "node_gbytes": node_gbytes, **asdict(scaling)}
    changed = [f"{name} {then[name] or 0:g} then {now[name] or 0:g}" for name in then if then[name] != now[name]]
    return changed + (settings_differences(trial.settings, settings) if trial.settings else [])


def emulated(plan: Plan) -> bool:
    return plan.device.startswith("emulated:")


def scaling_of(plan: Plan, group: PointGroup, shaped: bool, real_time: bool = False) -> Scaling:
    """A fabric that is not shaped can be neither scaled nor slowed."""
    if not emulated(plan) or not (shaped or group.nodes == 1):
        return Scaling()
    point = group.points[0]
    slowdown = 1.0 if real_time or not shaped else unfold.slowdown(plan, point)
    return Scaling(scale_model.factor(group.nodes, point.rate_gbps, slowdown, point.gpus_per_node), slowdown)


def is_checked(point: Point, shaped: bool) -> bool:
    """Whether a point is also run at twice the scale factor, to check the scaled network."""
    return point.nodes > 1 and point.device.startswith("emulated:") and shaped


def launch_spec(plan: Plan, group: PointGroup, shaped: bool, scaling: Scaling, check: bool) -> LaunchSpec:
    trials = [
        trial_spec(plan, point, shaped, scaling, twice)
        for point in group.points
        for twice in ((False, True) if check and is_checked(point, shaped) else (False,))
    ]
    rate, burst, cuda = trials[0].rate_mbit, trials[0].burst_ms, plan.device == "cuda"
    return LaunchSpec(group.engine, trials, rate_mbit=rate, burst_ms=burst, one_thread=emulated(plan), cuda=cuda)


def trial_spec(plan: Plan, point: Point, shaped: bool, scaling: Scaling, twice: bool) -> TrialSpec:
    link = plan.links.get(point.fabric)
    scale, slowdown = scaling.scale * (2 if twice else 1), scaling.slowdown
    return TrialSpec(
        id=point.id,
        device=point.device.partition(":")[0],
        model=point.model,
        batch=point.batch,
        pixels=models.get(point.model).input_pixels,
        tokens=models.get(point.model).tokens,
        images=point.batch * point.gpus,
        seconds=plan.seconds,
        scale=scale,
        slowdown=slowdown,
        check=twice,
        rate_mbit=point.rate_gbps * 1000 / scale / slowdown if shaped else None,
        burst_ms=link.burst_ms * slowdown if link and link.burst_ms else None,
        compute_ms=unfold.compute_ms(plan, point)[0] if emulated(plan) else None,
        node_s_per_byte=node_s_per_byte(plan, point) * scale * slowdown,
        compression=point.compression,
        precision=plan.precision or "fp32",
        channels_last=plan.channels_last,
        period=plan.period if point.engine in asynchronous.PERIODIC else 1,
        moving_rate=asynchronous.moving_rate(plan, point),
        split=split_engines.spec(plan, point),
        input=input_spec(plan, point, scale if emulated(plan) and shaped else 1.0),
    )


def node_s_per_byte(plan: Plan, point: Point) -> float:
    """Seconds per byte of gradients on the link between the emulated GPUs of a node, which NCCL's ring runs over."""
    gbytes = unfold.node_gbytes(plan, point)
    if not gbytes:
        return 0.0
    if point.engine == "hogwild":
        # Every GPU reads all shared weights and writes all updates.
        return 2 / (gbytes * 1e9)
    how = "all_gather" if point.compression == "1bit" else "ring"
    return transport.share(how, point.nodes, point.gpus_per_node) / (gbytes * 1e9)


def input_spec(plan: Plan, point: Point, scale: float) -> InputSpec | None:
    """Where a rank gets its images.

    A scaled fabric is slower by the scale factor, so a rank uses each sample that many times per read. Reading then
    takes as long as on the real fabric. Reads from a node's own disk are not scaled.
    """
    if point.data == "synthetic":
        return None
    location = point.data.partition(":")[2]
    reused = max(1, round(scale)) if "://" in location else 1
    return InputSpec(location, reused, plan.data_loader, plan.data_cores, plan.data_policy, plan.data_strict)


def gradients(plan: Plan, names: Iterable[str]) -> dict[str, list[Gradient]]:
    """The gradients of each model, for emulated devices; real devices compute their own."""
    if not emulated(plan):
        return {}
    return {
        name: [Gradient(elements, ready) for elements, ready in models.get(name).gradients_in_backward_order()]
        for name in sorted(set(names))
    }
