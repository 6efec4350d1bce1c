"""The schema of a plan file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from bench.catalogue import models
from bench.results.trial import Point
from cluster.core import files
from cluster.core.errors import UserError
from cluster.core.numbers import MOST
from cluster.core.sections import RateGbps, Section

PLANS = Path(__file__).parent / "shipped"


def _unique(values: list[Any]) -> list[Any]:
    if len(set(map(str, values))) != len(values):
        raise ValueError("has a duplicate; list each value once")
    return values


def _data(value: str) -> str:
    kind, _, location = value.partition(":")
    if value != "synthetic" and (kind != "shards" or not location.startswith(("/", "http://", "https://"))):
        raise ValueError("write synthetic, shards:/folder/on/every/node or shards:http://head:8880/name")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


Unique = AfterValidator(_unique)
Positive = Annotated[int, Field(ge=1, le=MOST)]
# From a microsecond to a quarter of an hour.
Milliseconds = Annotated[float, Field(ge=0.001, le=1e6, strict=False)]
Synchronous = Literal["horovod", "horovod-mpi", "horovod-gloo", "ddp", "ps"]
Asynchronous = Literal["ps-async", "easgd", "local-sgd", "hogwild"]
Split = Literal["fsdp", "pipeline", "tensor", "spatial"]
Engine = Literal[Synchronous, Asynchronous, Split]


class Link(Section):
    """A link rate to emulate, in addition to the fabrics of cluster.yml."""

    rate_gbps: RateGbps
    burst_ms: Annotated[float, Field(gt=0, le=500, strict=False)] | None = None


class Published(Section):
    """A published measurement to print beside ours."""

    fabric: str
    nodes: Positive
    batch: Positive
    step_ms: Milliseconds | None = None
    images_per_second: Annotated[float, Field(gt=0, le=1e9, strict=False)] | None = None
    source: str
    # Those of the point, if they are given.
    gpus_per_node: Positive | None = None
    model: str | None = None
    compression: str | None = None

    @model_validator(mode="after")
    def one_figure(self) -> Published:
        if (self.step_ms is None) == (self.images_per_second is None):
            raise ValueError("give either step_ms or images_per_second")
        return self

    def same(self, point: Point) -> bool:
        names = ("fabric", "nodes", "batch", "gpus_per_node", "model", "compression")
        return all(getattr(self, name) in (None, getattr(point, name)) for name in names)

    def milliseconds(self, point: Point) -> float:
        return self.step_ms or 1000 * point.batch * point.gpus / (self.images_per_second or 1)


class Plan(Section):
    """A sweep: every combination of the lists is a point."""

    title: str = Field(default="", description="title of the result table")
    nodes: Annotated[list[Positive], Field(min_length=1), Unique] = Field(
        description="node counts, such as [1, 2, 4]; auto: 1, 2, 4, ... up to all nodes that compute"
    )
    gpus_per_node: Annotated[
        list[Annotated[int, Field(ge=1, le=16)]], Field(min_length=1), Unique, BeforeValidator(_as_list)
    ] = Field(default=[1], description="processes on each node, one number or a list; auto: the GPUs of a node")
    batches: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=1), Unique] = Field(
        description="images per GPU and step"
    )
    fabrics: Annotated[list[str], Field(min_length=1), Unique] = Field(
        description="fabrics to measure: names from cluster.yml or from links; active: the active one; all: every one"
    )
    links: dict[str, Link] = Field(
        default={},
        description="extra link rates to emulate, in addition to the cluster's fabrics: name -> rate_gbps, burst_ms",
    )
    models: Annotated[list[str], Field(min_length=1), Unique] = Field(
        default=["resnet50"], description=", ".join((*models.NAMES, "or a CSV that `bench predict --torch` wrote"))
    )
    engines: Annotated[list[Engine], Field(min_length=1), Unique] = Field(
        default=["horovod"],
        description="horovod (MPI or Gloo, from the fabric's tuning), horovod-mpi, horovod-gloo, ddp, ps; "
        "asynchronous: ps-async, easgd, local-sgd, hogwild (docs/parallel.md); the network split over "
        "nodes: fsdp, pipeline, tensor, spatial (docs/split.md)",
    )
    period: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=4, description="steps between two exchanges of weights; engines easgd and local-sgd"
    )
    moving_rate: Annotated[float, Field(gt=0, le=1, strict=False)] | None = Field(
        default=None, description="share of the distance by which easgd moves weights and centre (default: 0.9 / ranks)"
    )
    stages: Positive | None = Field(
        default=None,
        description="stages of engine pipeline; nodes / stages pipelines average gradients (default: nodes)",
    )
    micro_batches: Positive | None = Field(
        default=None, description="micro-batches of engine pipeline per step (default: up to four per stage)"
    )
    schedule: Literal["1f1b", "gpipe"] | None = Field(
        default=None, description="order of work of engine pipeline: 1f1b (default), gpipe"
    )
    compressions: Annotated[list[Literal["none", "fp16", "1bit"]], Field(min_length=1), Unique] = Field(
        default=["none"], description="gradient compression: none, fp16, 1bit (with error feedback)"
    )
    launcher: Literal["usual", "torchrun"] = Field(
        default="usual", description="usual: the engine's own launcher; torchrun: engine ddp only"
    )
    container: str | None = Field(
        default=None, description="container image to run the worker in; native fabrics only, nodes need podman"
    )
    device: str = Field(
        default="emulated:p100",
        description="cuda, cpu, or emulated: with k80, 1080ti, p100, v100, a100 or h100; auto: cuda if nodes have GPUs",
    )
    compute_ms: Milliseconds | dict[str, Milliseconds] | None = Field(
        default=None, description="measured compute time of one step, or model: time; replaces the profile's"
    )
    interconnect: Literal["auto", "pcie", "nvlink"] = Field(
        default="auto",
        description="link between the emulated GPUs of a node; auto: nvlink with 8 GPUs, a100 and h100, pcie otherwise",
    )
    slowdown: Annotated[float, Field(ge=1, le=100, strict=False)] | None = Field(
        default=None,
        description="factor by which emulated time runs slower than real time (default: from nodes and rate)",
    )
    precision: str | None = Field(
        default=None,
        description="cuda: fp32 (default), tf32 or amp (bf16, or fp16 on older GPUs); emulated: of the published rate",
    )
    channels_last: bool = Field(default=False, description="images as height x width x channels in memory; cuda only")
    data: Annotated[
        list[Annotated[str, AfterValidator(_data)]], Field(min_length=1), Unique, BeforeValidator(_as_list)
    ] = Field(
        default=["synthetic"], description="data source: synthetic, shards:/folder or shards:http://... (docs/data.md)"
    )
    data_cores: Annotated[int, Field(ge=1, le=256)] = Field(default=2, description="decoding cores per GPU")
    data_policy: Literal["drop", "pad"] = Field(
        default="drop", description="what to do with samples left over after the last full batch"
    )
    data_strict: bool = Field(default=False, description="stop at the first damaged sample instead of skipping it")
    data_loader: Literal["cores", "dali"] = Field(
        default="cores", description="cores: decode on the CPU; dali: decode on the GPU, device cuda only"
    )
    scaling: Literal["weak", "strong"] = Field(
        default="weak", description="weak: batches are per GPU; strong: batches are shared by all GPUs"
    )
    repeats: Annotated[int, Field(ge=1, le=100)] = Field(default=1, description="measurements of every point")
    seconds: Annotated[float, Field(gt=0, le=86_400, strict=False)] = Field(
        default=20, description="time limit per point"
    )
    compare: list[Published] = Field(default=[], description="published figures to print beside the results")


def names() -> list[str]:
    return sorted(path.stem for path in PLANS.glob("*.yml"))


def find(text: str) -> Path:
    """The file of a shipped plan by its name, or of a plan by its path."""
    path = PLANS / f"{text}.yml"
    if not path.exists():
        path = Path(text)
        if not path.is_file():
            known = ", ".join(names())
            raise UserError(f"--plan {text}: no such plan or file; choose one of {known} or write your own")
    return path


def load(text: str) -> Plan:
    """A plan that names no field `auto`; fit.load reads any."""
    path = find(text)
    return files.validate(Plan, files.mapping(path), path.name, "plan")
