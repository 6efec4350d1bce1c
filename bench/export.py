"""Export a run as CSV, JSON, MLPerf-style log lines or TensorBoard scalars."""

from __future__ import annotations

import argparse
import csv
import io
import json
import struct
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from bench.results.points import Place
from bench.results.runs import Run, load
from bench.results.trial import Trial
from cluster.core.errors import InfraError, UserError

FORMATS = ("csv", "json", "mlperf", "tensorboard")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", default="latest", help="a run folder, or latest (default)")
    parser.add_argument("--format", choices=FORMATS, default="csv", help="what to write (default csv)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="file (tensorboard: folder); default: standard output")
    parser.add_argument("--json", action="store_true", help="same as --format json")


def run(args: argparse.Namespace) -> int:
    kind = "json" if args.json else args.format
    loaded = load(args.run)
    if kind == "tensorboard" and args.out is None:
        raise UserError("--out: TensorBoard wants a folder; add --out DIR and open it with tensorboard --logdir DIR")
    if args.out is None:
        print(WRITERS[kind](loaded), end="")
        return 0
    try:
        if kind == "tensorboard":
            written = write_tensorboard(loaded, args.out)
        else:
            args.out.write_text(WRITERS[kind](loaded))
            written = [args.out]
    except OSError as error:
        raise InfraError(f"--out: cannot write {args.out}: {error.strerror}") from error
    for path in written:
        print(f"wrote {path}")
    return 0


def columns(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Column names are the paths of the values in the record."""
    for name, info in model.model_fields.items():
        inner = next((part for part in (info.annotation, *get_args(info.annotation)) if is_record(part)), None)
        if inner is None:
            yield prefix + name
        else:
            yield from columns(inner, f"{prefix}{name}.")


def is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def flat(trial: Trial) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for path in columns(Trial):
        value: Any = trial
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        row[path] = json.dumps(value) if isinstance(value, dict | list) else value
    return row


def as_csv(run: Run) -> str:
    efficiency = efficiencies(run)
    rows = [flat(trial) | {"efficiency": efficiency.get(trial.id)} for trial in run.trials]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns(Trial), "efficiency"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: harmless(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def harmless(value: Any) -> Any:
    """Spreadsheets run a cell that starts like a formula; a leading quote keeps it text."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def efficiencies(run: Run) -> dict[str, float]:
    return {
        trial.id: place.efficiency.median
        for place in run.table().places
        if place.efficiency is not None
        for trial in place.trials
    }


def as_json(run: Run) -> str:
    efficiency = efficiencies(run)
    document = {
        "run": run.name,
        "plan": run.plan,
        "provenance": run.provenance,
        "problems": run.problems,
        "trials": [trial.model_dump() | {"efficiency": efficiency.get(trial.id)} for trial in run.trials],
    }
    return json.dumps(document, indent=1) + "\n"


def epoch_ms(started: str) -> int:
    try:
        moment = datetime.fromisoformat(started)
    except ValueError:
        return 0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def as_mlperf(run: Run) -> str:
    return "".join(f":::MLLOG {json.dumps(event)}\n" for trial in run.trials for event in mlperf_events(run, trial))


def mlperf_events(run: Run, trial: Trial) -> Iterator[dict[str, Any]]:
    """One trial as the events of one MLPerf run. Key names are MLCommons'; these are not MLPerf results."""
    start = epoch_ms(trial.started)
    timing = trial.timing
    begin = start + round(1000 * (timing.launch + timing.warmup)) if timing else start
    end = begin + round(1000 * timing.measure) if timing else begin
    point = trial.point
    number = 0

    def event(time: int, key: str, value: Any = None, kind: str = "POINT_IN_TIME", **metadata: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        return {
            "namespace": "",
            "time_ms": time,
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": "trials.jsonl", "lineno": number, "trial": trial.id, **metadata},
        }

    yield event(start, "submission_benchmark", "resnet" if point.model == "resnet50" else point.model)
    yield event(start, "submission_division", "open")
    yield event(start, "submission_status", "research")
    yield event(start, "submission_platform", f"{point.nodes}x{point.gpus_per_node}x{point.device} over {point.fabric}")
    yield event(start, "global_batch_size", point.gpus * point.batch)
    yield event(start, "init_start", kind="INTERVAL_START")
    yield event(begin, "init_stop", kind="INTERVAL_END")
    yield event(begin, "run_start", kind="INTERVAL_START")
    if trial.images_per_second is not None and trial.step_ms is not None:
        stats = {"throughput": trial.images_per_second.median, "step_time_ms": trial.step_ms.median}
        yield event(end, "tracked_stats", stats, step=trial.steps, emulated=trial.kind == "emulated")
        yield event(end, "train_samples", trial.steps * point.gpus * point.batch)
    status = "success" if trial.status == "ok" else "aborted"
    yield event(end, "run_stop", kind="INTERVAL_END", status=status)


def scalars(place: Place) -> dict[str, float]:
    values = {"images_per_second": place.ips.median, "step_ms": place.step_ms.median}
    if place.efficiency is not None:
        values["efficiency"] = place.efficiency.median
    if place.bus_gbps is not None:
        values["bus_bandwidth_gbps"] = place.bus_gbps.median
    if place.breakdown is not None:
        values |= {f"step/{name}_ms": value for name, value in place.breakdown.model_dump().items()}
    return values


def write_tensorboard(run: Run, folder: Path) -> list[Path]:
    """One TensorBoard run per curve, nodes on the step axis."""
    curves: dict[str, list[Place]] = {}
    for place in run.table().places:
        family = place.family
        parts = (family.device, family.model, family.engine, family.compression, place.fabric, f"batch{place.batch}")
        name = "_".join(safe(part) for part in parts)
        if family.gpus_per_node > 1:
            name += f"_{family.gpus_per_node}gpu"
        if family.data != "synthetic":
            name += "_realdata"
        curves.setdefault(name, []).append(place)
    written = []
    for name, places in curves.items():
        home = folder / name
        home.mkdir(parents=True, exist_ok=True)
        moment = epoch_ms(places[0].trials[0].started) / 1000
        # A fixed name: exporting twice replaces the curve instead of drawing it twice.
        path = home / "events.out.tfevents.0.bench"
        records = [event_bytes(moment, 0, version="brain.Event:2")]
        for place in places:
            records += [event_bytes(moment, place.nodes, {tag: value}) for tag, value in scalars(place).items()]
        path.write_bytes(b"".join(record_bytes(record) for record in records))
        written.append(path)
    return written


def safe(text: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-." else "-" for sign in text).lstrip(".")


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def event_bytes(moment: float, step: int, values: dict[str, float] | None = None, version: str | None = None) -> bytes:
    """TensorFlow's Event message: wall_time 1, step 2, file_version 3, summary 5 {value 1 {tag 1, simple_value 2}}."""
    out = varint(1 << 3 | 1) + struct.pack("<d", moment) + varint(2 << 3) + varint(step)
    if version is not None:
        out += field(3, version.encode())
    if values:
        summary = b"".join(
            field(1, field(1, tag.encode()) + varint(2 << 3 | 5) + struct.pack("<f", value))
            for tag, value in values.items()
        )
        out += field(5, summary)
    return out


def record_bytes(payload: bytes) -> bytes:
    """TFRecord framing: length, its checksum, payload, its checksum."""
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked(crc32c(length))) + payload + struct.pack("<I", masked(crc32c(payload)))


def make_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


TABLE = make_table()


def crc32c(data: bytes) -> int:
    """Castagnoli's polynomial, which zlib does not have."""
    value = 0xFFFFFFFF
    for byte in data:
        value = TABLE[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def masked(value: int) -> int:
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


WRITERS: dict[str, Callable[[Run], str]] = {"csv": as_csv, "json": as_json, "mlperf": as_mlperf}
