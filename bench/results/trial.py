"""What one trial is: the record in trials.jsonl, which sweep writes and report, explain, compare and predict read."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.core.contract import TransportName

SCHEMA_VERSION = 2


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Interval(Record):
    """A median with its 95% interval."""

    median: float
    low: float
    high: float


class Point(Record):
    """The conditions of a trial: what the plan varies."""

    fabric: str
    rate_gbps: float = Field(description="link rate of one node on this fabric, as the modelled cluster has it")
    nodes: int
    gpus_per_node: int
    batch: int = Field(description="images per GPU and step")
    model: str
    engine: str = Field(description="horovod-mpi | horovod-gloo | ddp | ps")
    compression: str = Field(default="none", description="none | fp16 | 1bit")
    device: str = Field(description="cuda | cpu | emulated:<profile>")
    data: str = Field(default="synthetic", description="synthetic | shards:<url or path>")
    repeat: int = 0
    transport: TransportName = Field(default="tcp", description="how the fabric carries bytes, from the contract")

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def id(self) -> str:
        """The same as in schema 1, which had no transport: what was measured before is not measured again."""
        return hashlib.sha256(self.model_dump_json(exclude={"transport"}).encode()).hexdigest()[:12]


class Emulation(Record):
    """How the scale model stood in for hardware. Present exactly when the device is emulated."""

    profile: str
    profile_source: str
    compute_ms: float = Field(description="forward plus backward of one step on the emulated device")
    scale: float = Field(description="s: bytes and rate are both divided by it")
    slowdown: float = Field(default=1.0, description="t: the trial ran this much slower; all times are divided by it")
    check_scale: float | None = Field(default=None, description="the other s the point was run at, normally 2s")
    check_ratio: float | None = Field(default=None, description="step time at check_scale over step time at scale")
    converged: bool | None = Field(default=None, description="both within 5%; None when not checked")


class Breakdown(Record):
    """Where a step's time went, in ms, medians over steps; they add up to about the step time."""

    compute: float
    exposed_comm: float
    data_wait: float
    straggler_wait: float


class Traffic(Record):
    """Proof of which interface carried the bytes, per node and trial."""

    interface: str
    expected_bytes: float = Field(description="per node and step, sent, as the algorithm needs at this scale")
    fixed_bytes: float = Field(
        default=0.0,
        description="per node and step, what did not shrink with s (negotiation, packets' headers), from s and 2s",
    )
    measured_bytes: dict[str, float] = Field(description="node -> bytes sent per step on the fabric interface")
    nccl: list[str] = Field(
        default_factory=list, description="networks that NCCL says it sent over, such as IB or Socket; on device cuda"
    )
    other_bytes: dict[str, dict[str, float]] = Field(
        default_factory=dict, description="node -> other interface -> bytes sent per step"
    )


class Input(Record):
    """What the input pipeline did while the trial was measured. Present exactly when the data is real."""

    cores: int = Field(description="that decode, per GPU")
    decode_busy: float = Field(description="share of the time these cores were decoding, mean over GPUs")
    decode_images_per_second: float = Field(description="what they can do, all GPUs together")
    read_mb_per_second: float = Field(description="while reading, all GPUs together")
    reused: int = Field(default=1, description="how often a sample was used per read: bytes scaled like the fabric")
    skipped: dict[str, int] = Field(default_factory=dict, description="damage -> samples that were left out")
    examples: list[str] = Field(default_factory=list, description="some of them by name")


class Timing(Record):
    """Seconds of wall clock this trial cost."""

    launch: float
    warmup: float
    measure: float


class Trial(Record):
    schema_version: int = SCHEMA_VERSION
    id: str
    point: Point
    status: Literal["ok", "failed"]
    error: str | None = Field(default=None, description="one line; set when failed")
    error_node: str | None = None
    kind: Literal["emulated", "cpu", "cuda"]
    started: str
    steps: int = Field(default=0, description="measured steps (after warm-up)")
    step_ms: Interval | None = None
    images_per_second: Interval | None = Field(default=None, description="total over all GPUs")
    breakdown_ms: Breakdown | None = None
    bus_bandwidth_gbps: Interval | None = Field(
        default=None, description="2(n-1)/n x gradient bytes over communication time, in the modelled cluster's units"
    )
    link_gbps: float | None = Field(
        default=None,
        description="goodput of the link, same units: its rate times the share that ring neighbours measured",
    )
    emulation: Emulation | None = None
    input: Input | None = None
    traffic: Traffic | None = None
    stragglers: list[str] = Field(default_factory=list)
    host_cpu_percent: float | None = None
    timing: Timing | None = None
    log: str | None = Field(default=None, description="path inside the run folder")
    step_times: str | None = Field(default=None, description="path inside the run folder: every step of every rank")
    loss: list[float] = Field(default_factory=list, description="first and last training loss on real devices")

    @model_validator(mode="before")
    @classmethod
    def from_schema_1(cls, value: Any) -> Any:
        """Schema 1 called the proof `transport`."""
        if isinstance(value, dict) and value.get("schema_version") == 1 and "transport" in value:
            value = {**value, "traffic": value["transport"]}
            del value["transport"]
        return value
