"""Turn the log of a worker that ran on somebody else's cluster into trials, which every report and plot takes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from bench.plan.schema import Plan
from bench.plan.unfold import PointGroup, compute_ms, node_gbytes
from bench.results.store import RunFolder
from bench.results.trial import Trial
from bench.sweep import nccl_log, record, run_folder, transport
from bench.worker import protocol
from bench.worker.protocol import Failed, TrialDone
from cluster.core import files
from cluster.core.errors import UserError
from cluster.tuning import Tuning


def store(
    log: Path, env: str, name: str, plan: Plan, group: PointGroup, interface: str
) -> tuple[RunFolder, list[Trial]]:
    """Append the trials of a log to results/<env>/<name>. Those that it has already are replaced."""
    lines = files.text(log, f"--results: {log}").splitlines()
    points = {point.id: point for point in group.points}
    nccl = nccl_log.Log(group.points[0].transport, interface, "") if plan.device == "cuda" else None
    started = datetime.now(UTC).isoformat(timespec="seconds")
    found: list[tuple[Trial, TrialDone | None]] = []
    for line in lines:
        event = protocol.parse(line)
        if event is None and nccl:
            nccl.read(line)
        elif isinstance(event, TrialDone) and event.id in points:
            point = points.pop(event.id)
            compute = compute_ms(plan, point) if point.device.startswith("emulated:") else None
            how, gbytes = transport.algorithm(point, Tuning()), node_gbytes(plan, point)
            trial = record.trial(
                point, event, None, compute, interface, 0.0, started, None, nccl, algorithm=how, node_gbytes=gbytes
            )
            found.append((trial, event))
            if nccl:
                nccl.start_trial()
        elif isinstance(event, Failed):
            found += [(record.failure(point, event.error, None, started, None), None) for point in points.values()]
            points = {}
    if not found:
        raise UserError(
            f"--results: {log}: no result of the plan's points on {group.nodes} nodes; give the log of rank 0"
        )
    missing = "the log ends without a result; the pods were ended, or the log is not complete"
    found += [(record.failure(point, missing, None, started, None), None) for point in points.values()]
    folder = run_folder.open_run(env, name, plan)
    folder.prepare(plan.model_dump(), {})
    trials = []
    for trial, event in found:
        steps = folder.write_steps(trial.id, event.ranks) if event else None
        trials.append(trial.model_copy(update={"step_times": steps}))
        folder.append(trials[-1])
    return folder, trials
