"""Export a run as CSV, JSON, MLPerf-style log lines or TensorBoard scalars."""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from bench.parse import named_path
from bench.results import dimensions
from bench.results.points import MergedPoint
from bench.results.runs import Run, load, print_problems
from bench.results.trial import Trial
from cluster.core.errors import InfraError, UserError

FORMATS = ("csv", "json", "mlperf", "tensorboard")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", default="latest", help="a run folder, or latest (default)")
    parser.add_argument("--format", choices=FORMATS, default="csv", help="output format (default csv)")
    parser.add_argument(
        "--out", type=named_path, metavar="PATH", help="file (tensorboard: folder); default: standard output"
    )
    parser.add_argument("--json", action="store_true", help="same as --format json")


def run(args: argparse.Namespace) -> int:
    kind = "json" if args.json else args.format
    loaded = load(args.run)
    print_problems(loaded)
    if kind == "tensorboard" and args.out is None:
        raise UserError("--out: TensorBoard needs a folder; add --out DIR and open it with tensorboard --logdir DIR")
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
    """Spreadsheets execute a cell that starts like a formula. A leading quote keeps it text."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def efficiencies(run: Run) -> dict[str, float]:
    return {
        trial.id: point.efficiency.median
        for point in run.table().points
        if point.efficiency is not None
        for trial in point.trials
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
    platform = f"{point.nodes}x{point.gpus_per_node}x{point.device} over {point.fabric} ({point.transport})"
    yield event(start, "submission_platform", platform)
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


def scalars(point: MergedPoint) -> dict[str, float]:
    values = {"images_per_second": point.ips.median, "step_ms": point.step_ms.median}
    if point.efficiency is not None:
        values["efficiency"] = point.efficiency.median
    if point.bus_gbps is not None:
        values["bus_bandwidth_gbps"] = point.bus_gbps.median
    if point.breakdown is not None:
        values |= {f"step/{name}_ms": value for name, value in point.breakdown.model_dump().items()}
    return values


def write_tensorboard(run: Run, folder: Path) -> list[Path]:
    """One TensorBoard run per curve, nodes on the step axis."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import RecordWriter

    curves: dict[str, list[MergedPoint]] = {}
    points = run.table().points
    two_rates = "rate" in dimensions.varying(point.conditions for point in points)
    for point in points:
        family = point.family
        parts = (family.device, family.model, family.engine, family.compression, point.fabric, f"batch{point.group}")
        name = "_".join(safe(part) for part in parts)
        if point.transport != "tcp":
            name += f"_{point.transport}"
        if family.gpus_per_node > 1:
            name += f"_{family.gpus_per_node}gpu"
        if family.data != "synthetic":
            name += f"_{safe(family.data)}"
        if two_rates:
            name += f"_{point.rate_gbps:g}gbps"
        curves.setdefault(name, []).append(point)
    written = []
    for name, points in curves.items():
        home = folder / name
        home.mkdir(parents=True, exist_ok=True)
        moment = epoch_ms(points[0].trials[0].started) / 1000
        # A fixed name: exporting twice replaces the curve instead of drawing it twice.
        path = home / "events.out.tfevents.0.bench"
        writer = RecordWriter(str(path.resolve()))
        writer.write(Event(wall_time=moment, file_version="brain.Event:2").SerializeToString())
        for point in points:
            for tag, value in scalars(point).items():
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                writer.write(Event(wall_time=moment, step=point.nodes, summary=summary).SerializeToString())
        writer.close()
        written.append(path)
    return written


def safe(text: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-." else "-" for sign in text).lstrip(".")


WRITERS: dict[str, Callable[[Run], str]] = {"csv": as_csv, "json": as_json, "mlperf": as_mlperf}
