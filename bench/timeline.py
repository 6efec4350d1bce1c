"""Sum up the exposed communication of each step from a Horovod timeline."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.parse import named_path
from cluster.core import files
from cluster.core.errors import InfraError, UserError
from cluster.core.numbers import POSITIVE
from cluster.core.tables import columns

COLLECTIVES = ("ALLREDUCE", "ADASUM", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER")
OUR_PID = 1_000_000
# Horovod writes an event per line, so the last complete one is near the end.
SALVAGE_TRIES = 20


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", type=named_path, help="timeline written by Horovod (bench sweep --timeline)"
    )
    op = "collective to count (default ALLREDUCE)"
    parser.add_argument("--op", default="ALLREDUCE", choices=COLLECTIVES, help=op)
    parser.add_argument("--compute-ms", type=POSITIVE, metavar="MS", help="compute time of one step, from its trial")
    out = "also write the trace with a row that shows exposed time"
    parser.add_argument("--out", type=named_path, metavar="FILE", help=out)
    parser.add_argument("--json", action="store_true", help="print every step as JSON")


@dataclass
class Occurrence:
    """One tensor in one step, in microseconds. Negotiation lasts from the first rank that has it to the last."""

    first_ready: float
    all_ready: float | None = None
    started: float | None = None
    ended: float | None = None
    ready: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    number: int
    tensors: int
    period_ms: float | None
    comm_ms: float
    exposed_ms: float
    hidden_ms: float
    rank_spread_ms: float
    last_rank: str | None
    compute_end_us: float
    end_us: float


def run(args: argparse.Namespace) -> int:
    if args.compute_ms is not None and not args.compute_ms > 0:
        raise UserError(f"--compute-ms: {args.compute_ms:g} must be above 0")
    events = read(args.file)
    steps = analyse(events, args.op, args.compute_ms)
    if not steps:
        raise UserError(
            f"FILE: {args.file} has no complete {args.op}; is it a Horovod timeline, and did a step finish?"
        )
    if args.out is not None:
        try:
            args.out.write_text(json.dumps(annotated(events, steps)))
        except OSError as error:
            raise InfraError(f"--out: cannot write {args.out}: {error.strerror}") from error
    summary = summarise(steps) | {"lower_bound": args.compute_ms is None}
    if args.json:
        print(json.dumps({**summary, "steps": [asdict(step) for step in steps]}, indent=1))
    else:
        print(as_text(summary, steps))
        if args.out is not None:
            print(f"wrote {args.out}; open it in chrome://tracing or ui.perfetto.dev")
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace. A trace that was cut off is read up to its last complete event."""
    text = files.text(path, f"FILE: {path}")
    try:
        found = files.parse(text, "JSON", "FILE")
    except UserError:
        found = salvage(text)
    if isinstance(found, dict):
        found = found.get("traceEvents")
    if not isinstance(found, list):
        raise UserError(f"FILE: {path} is not a trace: Horovod writes a JSON list of events")
    return [event for event in found if isinstance(event, dict) and event]


def salvage(text: str) -> list[Any] | None:
    end = text.rfind("}")
    for _ in range(SALVAGE_TRIES):
        if end <= 0:
            break
        try:
            found = files.parse(text[: end + 1].rstrip().rstrip(",") + "]", "JSON", "FILE")
        except UserError:
            # The brace is inside an unfinished event: go back to the end of the line before.
            cut = text.rfind("\n", 0, end)
            end = text.rfind("}", 0, cut) if cut > 0 else -1
            continue
        return found if isinstance(found, list) else None
    return None


def analyse(events: list[dict[str, Any]], op: str = "ALLREDUCE", compute_ms: float | None = None) -> list[Step]:
    """A tensor takes part once per step, so its k-th collective belongs to step k."""
    open_spans: dict[int, list[str]] = defaultdict(list)
    seen: dict[int, list[Occurrence]] = {}
    for event in events:
        pid, phase, moment = event.get("pid"), event.get("ph"), event.get("ts")
        if not isinstance(pid, int) or not isinstance(moment, int | float) or pid >= OUR_PID:
            continue
        name = str(event.get("name", ""))
        if phase == "B":
            open_spans[pid].append(name)
            if name == f"NEGOTIATE_{op}":
                seen.setdefault(pid, []).append(Occurrence(moment))
            elif name == op:
                found = seen.setdefault(pid, [])
                if not found or found[-1].started is not None:
                    found.append(Occurrence(moment))
                found[-1].started = moment
        elif phase == "X" and name.isdigit() and pid in seen:
            seen[pid][-1].ready[name] = moment
        elif phase == "E" and open_spans[pid]:
            ended = open_spans[pid].pop()
            if pid in seen and ended == op:
                seen[pid][-1].ended = moment
            elif pid in seen and ended == f"NEGOTIATE_{op}":
                seen[pid][-1].all_ready = moment
    if not seen:
        return []
    # Tensors that appear rarely (a metric averaged once, a broadcast of state) are not part of the training step.
    usual = statistics.median(len(found) for found in seen.values())
    regular = [found for found in seen.values() if len(found) >= 0.5 * usual]
    steps: list[Step] = []
    for number in range(min(len(found) for found in regular)):
        members = [found[number] for found in regular]
        if all(member.started is not None and member.ended is not None for member in members):
            steps.append(measure(number, members, steps[-1].end_us if steps else None, compute_ms))
    return steps


def measure(number: int, members: list[Occurrence], before_us: float | None, compute_ms: float | None) -> Step:
    spans = union([(m.started, m.ended) for m in members if m.started is not None and m.ended is not None])
    end = spans[-1][1]
    last = max(members, key=lambda m: m.all_ready or m.first_ready)
    if compute_ms is not None and before_us is not None:
        # The next step starts when the last gradient of this one has arrived.
        compute_end = min(before_us + 1000 * compute_ms, end)
    else:
        # Every rank had its last gradient by then. A background thread that is busy reducing notices late, so the
        # exposed time is at least what follows.
        compute_end = last.all_ready or last.first_ready
    exposed = sum(max(0.0, stop - max(start, compute_end)) for start, stop in spans)
    total = sum(stop - start for start, stop in spans)
    return Step(
        number=number,
        tensors=len(members),
        period_ms=None if before_us is None else (end - before_us) / 1000,
        comm_ms=total / 1000,
        exposed_ms=exposed / 1000,
        hidden_ms=(total - exposed) / 1000,
        rank_spread_ms=((last.all_ready or last.first_ready) - last.first_ready) / 1000,
        last_rank=max(last.ready, key=lambda rank: last.ready[rank]) if last.ready else None,
        compute_end_us=compute_end,
        end_us=end,
    )


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def summarise(steps: list[Step]) -> dict[str, Any]:
    # The first step negotiates every tensor for the first time and is not typical.
    typical = steps[1:] or steps
    medians = ("exposed_ms", "hidden_ms", "comm_ms", "rank_spread_ms")
    return {
        "count": len(steps),
        "tensors": steps[-1].tensors,
        **{name: float(statistics.median(getattr(step, name) for step in typical)) for name in medians},
        "exposed_total_ms": sum(step.exposed_ms for step in steps),
    }


def annotated(events: list[dict[str, Any]], steps: list[Step]) -> list[dict[str, Any]]:
    extra: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": OUR_PID, "args": {"name": "exposed communication"}},
        {"name": "process_sort_index", "ph": "M", "pid": OUR_PID, "args": {"sort_index": -1}},
    ]
    for step in steps:
        extra.append(
            {
                "name": f"step {step.number}: {step.exposed_ms:.1f} ms exposed",
                "ph": "X",
                "pid": OUR_PID,
                "tid": 0,
                "ts": step.compute_end_us,
                "dur": max(0.0, step.end_us - step.compute_end_us),
                "args": {"exposed_ms": step.exposed_ms, "hidden_ms": step.hidden_ms, "tensors": step.tensors},
            }
        )
    return [*events, *extra]


def as_text(summary: dict[str, Any], steps: list[Step]) -> str:
    shown = steps[:20]
    rows = []
    for step in shown:
        times = (step.period_ms, step.comm_ms, step.hidden_ms, step.exposed_ms, step.rank_spread_ms)
        cells = ("-" if value is None else f"{value:.1f}" for value in times)
        rows.append((str(step.number), *cells, step.last_rank or "-"))
    head = ("step", "period ms", "comm ms", "hidden ms", "exposed ms", "rank spread ms", "last rank")
    lines = [columns(head, rows)]
    if len(steps) > len(shown):
        lines.append(f"   ... {len(steps) - len(shown)} more (--json lists all)")
    share = summary["exposed_ms"] / summary["comm_ms"] if summary["comm_ms"] else 0.0
    least = "at least " if summary["lower_bound"] else ""
    lines.append(
        f"Typical step: {least}{summary['exposed_ms']:.1f} of {summary['comm_ms']:.1f} ms of communication is exposed "
        f"({share:.0%}), over {summary['tensors']} tensors; {least}{summary['exposed_total_ms']:.0f} ms over "
        f"{summary['count']} steps."
    )
    if summary["lower_bound"]:
        lines.append(
            "The timeline does not record when compute ended. --compute-ms gives an estimate instead of a bound."
        )
    return "\n".join(lines)
