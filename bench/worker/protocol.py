"""Messages between controller and worker: the spec, a file on every node, and the events that rank 0 prints.

Standard library only: both sides use it, and the controller has no torch.
"""

import ctypes
import hashlib
import json
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

MARK = "@bench "
ONE_BIT_HEADER = 8  # bytes: two means as float32


@dataclass(frozen=True)
class Gradient:
    """One tensor of a model; lists are in backward order."""

    elements: int
    ready: float  # fraction of backward after which it is ready


@dataclass(frozen=True)
class InputSpec:
    """Where a rank gets its images."""

    location: str
    reused: int
    loader: str
    cores: int
    policy: Literal["drop", "pad"]
    strict: bool


@dataclass(frozen=True)
class Operation:
    """What an emulated rank does next in a step of a network that is split over ranks.

    compute: `value` milliseconds. gather, scatter, sum: start a collective over `value` numbers in group `at`.
    send, receive: start to send `value` numbers to rank `at`, or wait for those from it. wait: for the collective that
    was started as number `at` of the step. finish: for all that was started.
    """

    kind: str
    value: float = 0.0
    at: int = 0


@dataclass(frozen=True)
class SplitSpec:
    """How a network is split over ranks."""

    stages: list[int] = field(default_factory=list)  # first unit of each stage of a pipeline
    micro_batches: int = 1
    schedule: str = "1f1b"
    groups: list[list[int]] = field(default_factory=list)  # ranks that add up together; the first group is all ranks
    programs: list[list[Operation]] = field(default_factory=list)  # of each rank; emulated devices only


@dataclass(frozen=True)
class TrialSpec:
    id: str
    device: str  # emulated, cpu or cuda
    model: str
    batch: int
    pixels: int
    images: int  # per step, all ranks together
    seconds: float
    scale: float = 1.0
    slowdown: float = 1.0
    check: bool = False  # run at twice the scale factor
    rate_mbit: float | None = None
    burst_ms: float | None = None
    compute_ms: float | None = None
    node_s_per_byte: float = 0.0  # least time of a sum on the link between a node's GPUs, per byte submitted
    compression: str = "none"
    precision: str = "fp32"  # fp32, tf32 or amp; real devices only
    channels_last: bool = False
    tokens: int = 0  # length of a sequence; 0: the model reads images
    period: int = 1  # steps between two exchanges of weights
    moving_rate: float = 0.0  # of easgd
    input: InputSpec | None = None
    split: SplitSpec | None = None  # engines that split the network, not the data


@dataclass(frozen=True)
class CaseSpec:
    """One collective of one size."""

    id: str
    collective: str
    count: int
    seconds: float


@dataclass(frozen=True)
class LearnSpec:
    """One training of the small network to a target accuracy; times are those of this machine."""

    id: str
    seed: int
    batch: int  # per rank
    learning_rate: float
    warmup_samples: int
    target: float
    max_samples: int
    compute_s: float  # forward and backward of the emulated device
    speed: float  # emulated seconds per second of this machine
    scale: float  # bytes of the named model over those of the small network
    evaluate: int  # steps between two measurements of the accuracy
    period: int = 1
    moving_rate: float = 0.0
    rate_mbit: float | None = None
    burst_ms: float | None = None


@dataclass(frozen=True)
class LaunchSpec:
    """What one start of the worker does: trials, cases of collectives, or trainings of the small network."""

    engine: str
    trials: list[TrialSpec] = field(default_factory=list)
    cases: list[CaseSpec] = field(default_factory=list)
    learns: list[LearnSpec] = field(default_factory=list)
    model: str = ""  # whose gradients the small network stands for
    data: str = ""  # file with its images
    rate_mbit: float | None = None  # set before the ranks connect
    burst_ms: float | None = None
    one_thread: bool = True
    cuda: bool = False


@dataclass(frozen=True)
class Spec:
    """All launches of a sweep. The gradients of a model are listed once, not per trial."""

    launches: list[LaunchSpec]
    gradients: dict[str, list[Gradient]] = field(default_factory=dict)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Step:
    """Seconds of one step on one rank."""

    total: float
    compute: float
    communication: float  # from the first gradient to the last sum
    data_wait: float


@dataclass(frozen=True)
class InputReport:
    """Counters of a rank's input pipeline during the measured steps."""

    cores: int
    reused: int
    elapsed_s: float
    read_bytes: float
    read_s: float
    decoded: float
    decode_s: float
    skipped: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RankReport:
    node: str
    local_rank: int
    steps: list[Step]
    sent: dict[str, float]  # interface -> bytes per step of the whole node
    input: InputReport | None = None
    parts: dict[str, list[str]] = field(default_factory=dict)  # interface or RDMA port -> interfaces it consists of
    clocks_mhz: list[float] = field(default_factory=list)  # of the GPU before and after the measured steps
    interface: str = ""  # of the fabric on this node, if the launch named a fabric
    not_finite: int | None = None  # first step, counted from 1 in the warm-up, whose loss is NaN or infinite
    staleness: dict[str, int] = field(default_factory=dict)  # updates of others in between -> updates seen here


@dataclass(frozen=True)
class Allocation:
    """A request for nodes, as Slurm's queue shows it."""

    job: str
    state: str
    reason: str = ""
    expected: str = ""  # start, as Slurm expects it


@dataclass(frozen=True)
class Started:
    size: int


@dataclass(frozen=True)
class WarmUp:
    id: str
    step_s: float


@dataclass(frozen=True)
class Progress:
    id: str
    images_per_second: float


@dataclass(frozen=True)
class TrialDone:
    id: str
    scale: float
    slowdown: float
    check: bool
    ranks: list[RankReport]
    losses: list[float]
    cpu_percent: float
    warmup_s: float
    measure_s: float
    precision: str | None = None  # what real devices computed in, such as amp bf16
    period: int = 1  # steps between two exchanges of weights


@dataclass(frozen=True)
class CaseDone:
    id: str
    times: list[float]
    errors: int


@dataclass(frozen=True)
class LearnDone:
    """Accuracy against emulated seconds and samples, and what every node sent per step."""

    id: str
    seconds: list[float]
    samples: list[int]
    accuracy: list[float]
    steps: int
    elements: int  # of the small network
    sent: dict[str, dict[str, float]]  # node -> interface -> bytes per step
    staleness: dict[str, int]
    overrun: float  # share of the steps whose own compute took longer than the emulated one
    digest: str  # of the last weights


@dataclass(frozen=True)
class DeviceReport:
    """What a rank found on its GPU."""

    node: str
    local_rank: int
    seen: int  # GPUs that torch sees on the node
    name: str
    driver: str
    cuda: str
    nccl: str
    product: str  # bf16 or fp32
    right: bool
    links: dict[str, int] = field(default_factory=dict)  # kind of link -> pairs of GPUs, on local rank 0


@dataclass(frozen=True)
class DevicesDone:
    ranks: list[DeviceReport]
    size: int  # bytes of the all-reduce
    times: list[float]
    errors: int


@dataclass(frozen=True)
class Failed:
    error: str


@dataclass(frozen=True)
class Finished:
    pass


Event = Allocation | Started | WarmUp | Progress | TrialDone | CaseDone | LearnDone | DevicesDone | Failed | Finished
EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Event)}


def one_bit_bytes(count: int) -> int:
    """Bytes of a tensor of count elements that bench/worker/compression.py sends as single bits."""
    return ONE_BIT_HEADER + (count + 7) // 8


def emit(event: Event) -> None:
    print(f"{MARK}{json.dumps({'event': type(event).__name__, **asdict(event)})}", flush=True)


def print_by_line() -> None:
    """Let NCCL's lines, which prove the transport, arrive before the event of their trial.

    NCCL prints by the C library. That keeps lines back where standard output is a pipe, and a rank ends without them.
    """
    libc = ctypes.CDLL(None)
    libc.setlinebuf(ctypes.c_void_p.in_dll(libc, "stdout"))


def parse(line: str) -> Event | None:
    """The event in a line of output; None if the line has no complete event."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        values = json.loads(text)
        event: Event = decode(EVENTS[values.pop("event")], values)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None
    return event


def read_spec(path: str, sha256: str) -> Spec:
    content = Path(path).read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise SystemExit(f"Error: {path}: wrong checksum: not the spec of this launch; run the same command again")
    spec: Spec = decode(Spec, json.loads(content))
    return spec


def decode(kind: Any, value: Any) -> Any:
    """Rebuild a dataclass from the output of asdict."""
    if isinstance(kind, type) and is_dataclass(kind):
        # The types of the fields are classes, not text: this file must not import annotations from __future__.
        return kind(**{item.name: decode(item.type, value[item.name]) for item in fields(kind) if item.name in value})
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else decode(inner[0], value)
    if origin is list:
        return [decode(inner[0], item) for item in value]
    if origin is dict:
        return {key: decode(inner[1], item) for key, item in value.items()}
    return value
