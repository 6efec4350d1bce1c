"""What controller and worker exchange: the spec of a launch, a file on every node, and the events that rank 0 prints.

Standard library only: both sides use it, and the controller has no torch.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar

MARK = "@bench "
T = TypeVar("T")


@dataclass(frozen=True)
class Gradient:
    """One tensor of a model, in the order in which backward yields them."""

    elements: int
    ready: float  # share of backward after which it is there


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
    check: bool = False  # the repetition at twice the scale factor
    rate_mbit: float | None = None
    burst_ms: float | None = None
    compute_ms: float | None = None
    compression: str = "none"
    input: InputSpec | None = None


@dataclass(frozen=True)
class CaseSpec:
    """One collective of one size."""

    id: str
    collective: str
    count: int
    seconds: float


@dataclass(frozen=True)
class LaunchSpec:
    """What one start of the worker does: trials, or cases of collectives."""

    engine: str
    trials: list[TrialSpec] = field(default_factory=list)
    cases: list[CaseSpec] = field(default_factory=list)
    rate_mbit: float | None = None  # in force before the ranks connect
    burst_ms: float | None = None
    one_thread: bool = True
    cuda: bool = False


@dataclass(frozen=True)
class Spec:
    """All launches of a sweep. A model's gradients are listed once, whatever the number of trials."""

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
    """What a rank's input pipeline did while it was measured."""

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
    sent: dict[str, float]  # interface -> bytes per step, of the whole node
    input: InputReport | None = None


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


@dataclass(frozen=True)
class CaseDone:
    id: str
    times: list[float]
    errors: int


@dataclass(frozen=True)
class Failed:
    error: str


@dataclass(frozen=True)
class Finished:
    pass


Event = Started | WarmUp | Progress | TrialDone | CaseDone | Failed | Finished
EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in typing.get_args(Event)}


def emit(event: Event) -> None:
    print(f"{MARK}{json.dumps({'event': type(event).__name__, **asdict(event)})}", flush=True)


def parse(line: str) -> Event | None:
    """The event in a line of output; None when the line holds none, or only a part of one."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        values = json.loads(text)
        event: Event = decode(EVENTS[values.pop("event")], values)
    except (KeyError, TypeError, ValueError):
        return None
    return event


def read_spec(path: str, sha256: str) -> Spec:
    with open(path, "rb") as file:  # noqa: PTH123
        content = file.read()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise SystemExit(f"Error: {path} is not the spec that the controller wrote")
    return decode(Spec, json.loads(content))


def decode(kind: type[T], value: Any) -> T:
    """A dataclass from what asdict made of it."""
    found: T = _decode(kind, value)
    return found


def _decode(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(
            **{one.name: _decode(hints[one.name], value[one.name]) for one in fields(kind) if one.name in value}
        )
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _decode(inner[0], value)
    if origin is list:
        return [_decode(inner[0], one) for one in value]
    if origin is dict:
        return {key: _decode(inner[1], one) for key, one in value.items()}
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
