"""What a plan file may say, and the launches and points it unfolds into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from bench import devices, models, scale
from bench.trial import Point
from cluster import tuning
from cluster.config import one_line
from cluster.contract import Contract
from cluster.errors import UserError
from cluster.tuning import Settings

Tuned = Mapping[str, Settings]
PLANS = Path(__file__).parent / "plans"
START_SECONDS, START_SECONDS_PER_NODE = 4.0, 0.8
STEPS = 16


def _unique(values: list[Any]) -> list[Any]:
    if len(set(map(str, values))) != len(values):
        raise ValueError("lists something twice; name each once")
    return values


def _data(value: str) -> str:
    kind, _, location = value.partition(":")
    if value != "synthetic" and (kind != "shards" or not location.startswith(("/", "http://", "https://"))):
        raise ValueError("write synthetic, shards:/folder/on/every/node or shards:http://head:8880/name")
    return value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Listed = AfterValidator(_unique)
Positive = Annotated[int, Field(ge=1)]


Engine = Literal["horovod", "horovod-mpi", "horovod-gloo", "ddp", "ps"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Link(Section):
    """A network the cluster is shaped to for this plan, besides the fabrics of cluster.yml."""

    rate_gbps: Annotated[float, Field(gt=0, le=800, strict=False)]
    burst_ms: Annotated[float, Field(gt=0, le=500, strict=False)] | None = None


class Published(Section):
    """A published measurement to print beside ours."""

    fabric: str
    nodes: Positive
    batch: Positive
    step_ms: Annotated[float, Field(gt=0, strict=False)]
    source: str


class Plan(Section):
    """A sweep: every combination of the lists is a point."""

    title: str = Field(default="", description="of the result table")
    nodes: Annotated[list[Positive], Field(min_length=1), Listed] = Field(description="how many, such as [1, 2, 4]")
    gpus_per_node: Annotated[int, Field(ge=1, le=16)] = Field(default=1, description="processes on each node")
    batches: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1), Listed] = Field(
        description="images per GPU and step"
    )
    fabrics: Annotated[list[str], Field(min_length=1), Listed] = Field(description="of cluster.yml or of links")
    links: dict[str, Link] = Field(
        default={}, description="networks of the plan's own, on a shaped fabric: name -> rate_gbps, burst_ms"
    )
    models: Annotated[list[str], Field(min_length=1), Listed] = Field(
        default=["resnet50"], description="resnet50, resnet101, resnet152, vgg16, alexnet, inceptionv3"
    )
    engines: Annotated[list[Engine], Field(min_length=1), Listed] = Field(
        default=["horovod"],
        description="horovod (over MPI or Gloo, as the fabric is tuned), horovod-mpi, horovod-gloo, ddp, ps",
    )
    compressions: Annotated[list[Literal["none", "fp16", "1bit"]], Field(min_length=1), Listed] = Field(
        default=["none"], description="of gradients: none, fp16, 1bit (with error feedback)"
    )
    launcher: Literal["usual", "torchrun"] = Field(default="usual", description="torchrun: for engine ddp")
    container: str | None = Field(
        default=None, description="training image that the worker runs in, on native fabrics; nodes need podman"
    )
    device: str = Field(
        default="emulated:p100", description="cuda, cpu, or emulated: with k80, 1080ti, p100, v100, a100 or h100"
    )
    compute_ms: Annotated[float, Field(gt=0, strict=False)] | None = Field(
        default=None, description="time of one step's compute, where it was measured, instead of the profile's"
    )
    slowdown: Annotated[float, Field(ge=1, le=100, strict=False)] | None = Field(
        default=None, description="how much slower than real time emulated devices run (default: from nodes and rate)"
    )
    precision: str | None = Field(default=None, description="of the emulated device's published rate, such as amp")
    data: Annotated[
        list[Annotated[str, AfterValidator(_data)]], Field(min_length=1), Listed, BeforeValidator(_listed)
    ] = Field(default=["synthetic"], description="synthetic, shards:/folder or shards:http://..., docs/data.md")
    data_cores: Annotated[int, Field(ge=1, le=256)] = Field(default=2, description="cores per GPU that decode images")
    data_policy: Literal["drop", "pad"] = Field(default="drop", description="of samples that fill no last batch")
    data_strict: bool = Field(default=False, description="stop at the first damaged sample instead of skipping it")
    data_loader: Literal["cores", "dali"] = Field(default="cores", description="dali decodes on the GPU: cuda only")
    scaling: Literal["weak", "strong"] = Field(
        default="weak", description="strong: batches are those of all GPUs together"
    )
    repeats: Annotated[int, Field(ge=1, le=100)] = Field(default=1, description="of every point")
    seconds: Annotated[float, Field(gt=0, strict=False)] = Field(default=20, description="time cap of one point")
    compare: list[Published] = Field(default=[], description="published figures that are printed beside ours")


@dataclass(frozen=True)
class Launch:
    """One start of the worker on some nodes; it serves all these points, so start-up is paid once."""

    fabric: str
    nodes: int
    engine: str
    points: tuple[Point, ...]


def names() -> list[str]:
    return sorted(path.stem for path in PLANS.glob("*.yml"))


def load(text: str) -> Plan:
    """A plan by its name in bench/plans or by the path of a file."""
    path = PLANS / f"{text}.yml"
    if not path.exists():
        path = Path(text)
        if not path.is_file():
            raise UserError(
                f"--plan {text}: no such plan or file; choose one of {', '.join(names())} or write your own"
            )
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{path.name}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path.name}: expected a mapping such as nodes: [1, 2]")
    try:
        return Plan.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path.name}: {one_line(error, 'plan')}") from None


def check(plan: Plan, cluster: Contract | None, available: int, gpus: int) -> None:
    """What a schema cannot know: does it fit this cluster, do the names exist."""
    if cluster:
        known = [*cluster.fabrics, *plan.links]
        for fabric in plan.fabrics:
            if fabric not in known:
                raise UserError(f"plan.fabrics: unknown fabric {fabric!r}; choose from {', '.join(known)}")
        shaped = cluster.fabrics[cluster.active_fabric].shaped
        for name in ("slowdown", "links"):
            if getattr(plan, name) and not shaped:
                raise UserError(f"plan.{name}: this cluster's fabrics are native and keep their own rate; leave it out")
        if plan.container and shaped:
            raise UserError(
                "plan.container: from inside a container nobody can set the rate of a shaped fabric; leave it out, "
                "or set shaped: false on the fabrics of cluster.yml and use device cpu or cuda"
            )
    if max(plan.nodes) > available:
        raise UserError(
            f"plan.nodes: {max(plan.nodes)} nodes asked, the cluster has {available}; "
            f"run `make scale NODES={max(plan.nodes)}` or list fewer"
        )
    if "1bit" in plan.compressions and "ps" in plan.engines:
        raise UserError("plan.compressions: 1bit does not go with engine ps; leave one of them out")
    if plan.launcher == "torchrun" and set(plan.engines) != {"ddp"}:
        raise UserError("plan.launcher: torchrun starts engine ddp only; set engines: [ddp]")
    for model in plan.models:
        models.get(model)
    if plan.data_loader == "dali" and plan.device != "cuda":
        raise UserError(f"plan.data_loader: dali needs device cuda, not {plan.device}; leave it out")
    kind, _, profile = plan.device.partition(":")
    if plan.slowdown and (kind != "emulated" or plan.data != ["synthetic"]):
        raise UserError("plan.slowdown: only emulated devices with synthetic data can be slowed; leave it out")
    if kind == "emulated":
        devices.get(profile)
    elif plan.device == "cuda":
        if gpus < plan.gpus_per_node:
            raise UserError(
                f"plan.device: cuda needs {plan.gpus_per_node} GPUs per node and the cluster has {gpus}; "
                "use emulated:<profile> or cpu"
            )
    elif plan.device != "cpu":
        raise UserError(f"plan.device: unknown device {plan.device!r}; choose cuda, cpu or emulated:<profile>")


def rate_of(plan: Plan, cluster: Contract | None, fabric: str) -> float:
    if fabric in plan.links:
        return plan.links[fabric].rate_gbps
    return cluster.fabrics[fabric].rate_gbps if cluster else {"1g": 1.0, "10g": 10.0, "ib": 100.0}.get(fabric, 10.0)


def one_job(cluster: Contract | None) -> bool:
    """GPULab's mode 1xN: what a plan calls nodes are then the GPUs of the one job."""
    return cluster is not None and cluster.provider == "gpulab" and len(cluster.nodes) == 1


def engine_of(plan: Plan, cluster: Contract | None, engine: str, fabric: str, tuned: Tuned) -> str:
    """What `horovod` means on this fabric. On GPUs NCCL carries the bytes and mpirun only starts the processes."""
    if engine != "horovod":
        return engine
    return "horovod-mpi" if plan.device == "cuda" else settings_of(cluster, fabric, tuned).engine


def settings_of(cluster: Contract | None, fabric: str, tuned: Tuned) -> Settings:
    """A link that is a plan's own is tuned as the fabric the cluster is set to."""
    if not cluster:
        return Settings()
    name = fabric if fabric in cluster.fabrics else cluster.active_fabric
    return tuning.choose(tuned, name, cluster.fabrics[name])


def unfold(plan: Plan, cluster: Contract | None, tuned: Tuned = MappingProxyType({})) -> Iterator[Launch]:
    """Launches in the order that shows most soonest: fabric by fabric, few nodes first."""
    for asked, fabric, count in product(plan.engines, plan.fabrics, plan.nodes):
        engine = engine_of(plan, cluster, asked, fabric, tuned)
        nodes, gpus = (1, count * plan.gpus_per_node) if one_job(cluster) else (count, plan.gpus_per_node)
        inner = product(plan.data, plan.models, plan.compressions, plan.batches, range(plan.repeats))
        points = tuple(
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
            )
            for data, model, compression, batch, repeat in inner
        )
        yield Launch(fabric, nodes, engine, points)


def compute_ms(plan: Plan, point: Point) -> tuple[float, str]:
    """Compute time of one step on the plan's emulated device, and where the figure comes from."""
    if plan.compute_ms is not None:
        return plan.compute_ms, "measured, given in the plan"
    return devices.compute_ms(point.device.partition(":")[2], point.model, point.batch, plan.precision)


def slowdown(plan: Plan, point: Point) -> float:
    """t of the scale model. Images are decoded in real time: with them nothing is slowed."""
    if not point.device.startswith("emulated:") or plan.data != ["synthetic"]:
        return 1.0
    return plan.slowdown or scale.slowdown(point.nodes, point.rate_gbps, point.engine)


def estimate_seconds(plan: Plan, point: Point) -> float:
    """Rough time one point takes: a step is compute plus what of the ring does not hide behind backward."""
    if not point.device.startswith("emulated:"):
        return plan.seconds
    compute = compute_ms(plan, point)[0] / 1000
    ring = 2 * (point.gpus - 1) / point.gpus * models.get(point.model).gradient_bytes * 8 / (point.rate_gbps * 1e9)
    step = max(compute, compute / 3 + ring * 1.2)
    return min(STEPS * step * slowdown(plan, point), plan.seconds * 1.5)


def estimate(plan: Plan, launches: Iterable[Launch]) -> dict[str, float]:
    """Rough seconds per point. Its share of the launch is in them: every rank loads torch, here on the same cores."""
    return {
        point.id: estimate_seconds(plan, point) + (START_SECONDS + START_SECONDS_PER_NODE * one.nodes) / len(one.points)
        for one in launches
        for point in one.points
    }
