"""The record of one trial in trials.jsonl, which sweep writes and report, explain, compare and predict read."""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from bench.results.provenance import PATTERN
from cluster.core.contract import TransportName

SCHEMA_VERSION = 2


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# JSON has no infinity. A trial whose loss is not finite has failed, but its record says so.
Loss = Annotated[float | None, BeforeValidator(_finite)]


class Interval(Record):
    """A median with its 95% interval."""

    median: float
    low: float
    high: float


class Point(Record):
    """The conditions of a trial: what the plan varies."""

    fabric: str
    rate_gbps: float = Field(description="link rate per node on this fabric, in the modelled cluster")
    nodes: int
    gpus_per_node: int
    batch: int = Field(description="images per GPU and step")
    model: str
    engine: str = Field(
        description="horovod-mpi | horovod-gloo | ddp | ps | ps-async | easgd | local-sgd | hogwild | fsdp | "
        "pipeline | tensor | spatial"
    )
    compression: str = Field(default="none", description="none | fp16 | 1bit")
    device: str = Field(description="cuda | cpu | emulated:<profile>")
    data: str = Field(default="synthetic", description="synthetic | shards:<url or path>")
    repeat: int = 0
    transport: TransportName = Field(default="tcp", description="transport of the fabric, from the contract")

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def id(self) -> str:
        """Excludes transport, which schema 1 did not have, so that a rerun still finds older trials."""
        return hashlib.sha256(self.model_dump_json(exclude={"transport"}).encode()).hexdigest()[:12]


class Emulation(Record):
    """Parameters of the scale model. Present if and only if the device is emulated."""

    profile: str
    profile_source: str
    compute_ms: float = Field(description="forward and backward time of one step on the emulated device")
    scale: float = Field(description="scale factor: bytes and rate are both divided by it")
    slowdown: float = Field(default=1.0, description="factor by which the trial ran slower; times are divided by it")
    node_gbytes: float | None = Field(
        default=None, description="ring bandwidth between the emulated GPUs of a node, in GB/s; null with one GPU"
    )
    check_scale: float | None = Field(
        default=None, description="second scale factor of the point, normally twice scale"
    )
    check_ratio: float | None = Field(default=None, description="step time at check_scale over step time at scale")
    converged: bool | None = Field(default=None, description="check_ratio within 5% of 1; None if not checked")


class Breakdown(Record):
    """Parts of a step in ms, medians over steps. Their sum is about the step time."""

    compute: float
    exposed_comm: float
    data_wait: float
    straggler_wait: float


class Traffic(Record):
    """Bytes sent per interface: proof that the traffic used the fabric."""

    interface: str
    algorithms: dict[str, float] = Field(
        default_factory=dict, description="algorithm -> share of the gradients' bytes; empty in earlier versions"
    )
    expected_bytes: float = Field(description="bytes per node and step that the algorithm must send at this scale")
    fixed_bytes: float = Field(
        default=0.0,
        description="bytes per node and step that do not shrink with scale (negotiation, headers), from the check",
    )
    measured_bytes: dict[str, float] = Field(description="node -> bytes sent per step on the fabric")
    nccl: list[str] = Field(
        default_factory=list, description="networks that NCCL reports, such as IB or Socket; device cuda only"
    )
    other_bytes: dict[str, dict[str, float]] = Field(
        default_factory=dict, description="node -> other interface -> bytes sent per step"
    )


class Input(Record):
    """The input pipeline during the measured steps. Present if and only if the data is real."""

    cores: int = Field(description="decoding cores per GPU")
    decode_busy: float = Field(description="share of time in which these cores decoded, mean over GPUs")
    decode_images_per_second: float = Field(description="decoding capacity, total over all GPUs")
    read_mb_per_second: float = Field(description="read rate while reading, total over all GPUs")
    reused: int = Field(default=1, description="uses per read of a sample, which scales reads like the fabric")
    skipped: dict[str, int] = Field(default_factory=dict, description="kind of damage -> number of skipped samples")
    examples: list[str] = Field(default_factory=list, description="names of some skipped samples")


class Timing(Record):
    """Wall-clock seconds of this trial."""

    launch: float
    warmup: float
    measure: float


class Steadiness(Record):
    """How steady the measured steps were. A GPU whose clock falls makes the second half slower than the first."""

    drift: float = Field(description="median step of the second half over that of the first, less one")
    spread: list[float] = Field(description="first and second half: distance of the quartiles over the median")
    clocks_mhz: dict[str, list[float]] = Field(
        default_factory=dict, description="node/rank -> clock of the GPU before and after; where nvidia-smi answers"
    )


class Staleness(Record):
    """How many updates of other ranks came between the weights that a rank computed on and its own update."""

    mean: float
    median: float
    p95: float
    largest: int
    updates: int = Field(description="number of updates that were counted")


class Weights(Record):
    """The exchange of weights. Present if and only if the engine is ps-async, easgd, local-sgd or hogwild."""

    period: int = Field(description="steps from one exchange to the next")
    moving_rate: float | None = Field(default=None, description="engine easgd only")
    staleness: Staleness | None = Field(
        default=None, description="null for local-sgd, which averages the weights of all ranks at once"
    )


class LinkEvidence(Record):
    """A fabric's link as the last deploy measured it. It counts for that fabric only, if the outcome is ok."""

    fabric: str
    share: float = Field(description="goodput over rate between the slowest pair of ring neighbours")
    measured: str = Field(description="when; compare with started")
    outcome: Literal["ok", "warned", "failed"] = Field(description="of the validation")

    def counts_for(self, point: Point) -> bool:
        return self.outcome == "ok" and self.fabric == point.fabric


class Settings(Record):
    """What determines a measurement beside its point. A sweep measures again what was measured under other settings."""

    launcher: str = Field(description="usual | torchrun")
    container: str | None = None
    seconds: float = Field(description="time limit of the point")
    burst_ms: float | None = Field(default=None, description="depth of the link's token bucket, from the plan")
    tuning: dict[str, float | int | str] = Field(description="collectives: Horovod, OpenMPI and NCCL on this fabric")
    training: dict[str, bool | float | str] = Field(
        default_factory=dict,
        description="device cuda: precision, channels_last; engines that exchange weights: period, moving_rate",
    )
    loader: dict[str, bool | int | str] = Field(default_factory=dict, description="input pipeline; empty without one")
    split: dict[str, int | str] = Field(
        default_factory=dict, description="stages, micro_batches and schedule; engine pipeline only"
    )


# A trial that failed has no figures: they would be read as if they counted. Its step times stay in step_times.
FIGURES = ("step_ms", "images_per_second", "breakdown_ms", "bus_bandwidth_gbps", "link_gbps")


class Trial(Record):
    schema_version: int = SCHEMA_VERSION
    id: str
    point: Point
    status: Literal["ok", "failed"]
    error: str | None = Field(default=None, description="one line; set if the trial failed")
    error_node: str | None = None
    kind: Literal["emulated", "cpu", "cuda"]
    started: str
    steps: int = Field(default=0, description="number of measured steps, without warm-up")
    step_ms: Interval | None = None
    images_per_second: Interval | None = Field(default=None, description="total over all GPUs")
    breakdown_ms: Breakdown | None = None
    bus_bandwidth_gbps: Interval | None = Field(
        default=None,
        description="gradient bytes that a node must send, over communication time, in units of the modelled cluster",
    )
    link_gbps: float | None = Field(
        default=None,
        description="goodput of the link in the same units: rate times the share in link, if it counts for this fabric",
    )
    link: LinkEvidence | None = None
    emulation: Emulation | None = None
    input: Input | None = None
    traffic: Traffic | None = None
    stragglers: list[str] = Field(default_factory=list)
    host_cpu_percent: float | None = None
    timing: Timing | None = None
    log: str | None = Field(default=None, description="path of the log in the run folder")
    step_times: str | None = Field(default=None, description="path of every step of every rank, in the run folder")
    settings: Settings | None = Field(default=None, description="absent in trials of earlier versions")
    provenance: str | None = Field(
        default=None,
        pattern=PATTERN,
        description="file in the run folder that describes the environment; provenance.json if not set",
    )
    precision: str | None = Field(
        default=None, description="what the GPUs computed in: fp32 | tf32 | amp bf16 | amp fp16; device cuda only"
    )
    steadiness: Steadiness | None = Field(default=None, description="device cuda only")
    weights: Weights | None = None
    job: str | None = Field(default=None, description="number of the Slurm job; executor slurm only")
    loss: list[Loss] = Field(
        default_factory=list, description="first and last training loss on real devices; null: not finite"
    )

    @model_validator(mode="before")
    @classmethod
    def from_earlier_versions(cls, value: Any) -> Any:
        """Schema 1 had the field traffic under the name transport, and failed trials had figures."""
        if isinstance(value, dict) and value.get("schema_version") == 1 and "transport" in value:
            value = {**value, "traffic": value["transport"]}
            del value["transport"]
        if isinstance(value, dict) and value.get("status") == "failed":
            value = {name: content for name, content in value.items() if name not in FIGURES}
        return value
