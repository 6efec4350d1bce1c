"""The table at the end of a sweep."""

from __future__ import annotations

from itertools import product

from rich.table import Table

from bench import words
from bench.plan.schema import Plan
from bench.results import dimensions
from bench.results.store import RunFolder
from bench.results.trial import Trial
from bench.sweep.progress import console

ALWAYS = ("engine", "fabric", "nodes", "batch")


def efficiency(trial: Trial, trials: list[Trial]) -> float | None:
    """Images/s per node, relative to the same point on one node."""
    single_id = trial.point.model_copy(update={"nodes": 1, "repeat": 0}).id
    single = next((other for other in trials if other.id == single_id), None)
    if not (single and single.images_per_second and trial.images_per_second):
        return None
    return trial.images_per_second.median / trial.point.nodes / single.images_per_second.median


def show(trials: list[Trial], plan: Plan, spent: dict[str, float], folder: RunFolder) -> None:
    emulated = any(trial.kind == "emulated" for trial in trials)
    title = ("EMULATED " if emulated else "") + (plan.title or "results")
    more = dimensions.varying((trial.point for trial in trials), without=ALWAYS)
    figures = ("images/s", "95%", "step ms", "efficiency", "CPU %", "note")
    table = Table(*ALWAYS, *(name.replace("_", " ") for name in more), *figures, title=title, title_justify="left")
    for trial in trials:
        point, rate, step = trial.point, trial.images_per_second, trial.step_ms
        note = ""
        if trial.status == "failed":
            note = f"FAILED: {trial.error or 'no error text was recorded'}"
        elif trial.emulation and trial.emulation.converged is False:
            note = f"not converged (x{trial.emulation.check_ratio:.2f} at twice the scale factor)"
        if trial.input and trial.breakdown_ms and step:
            note += f" real data: {trial.breakdown_ms.data_wait / step.median:.0%} wait"
        share = efficiency(trial, trials)
        table.add_row(
            *(point.engine, words.fabric(point), str(point.nodes), str(point.batch)),
            *(dimensions.label(point, [name]) for name in more),
            f"{rate.median:.1f}" if rate else "-",
            f"{rate.low:.1f}-{rate.high:.1f}" if rate else "-",
            f"{step.median:.1f}" if step else "-",
            f"{share:.0%}" if share else "-",
            f"{trial.host_cpu_percent:.0f}" if trial.host_cpu_percent is not None else "-",
            note.strip(),
        )
    console.print(table)
    for theirs, trial in product(plan.compare, trials):
        if theirs.same(trial.point) and trial.step_ms:
            ours, published = trial.step_ms.median, theirs.milliseconds(trial.point)
            text = f"{ours:.1f} ms, published {published:.1f} ms ({ours / published - 1:+.1%}; {theirs.source})"
            console.print(f"{dimensions.label(trial.point, ['fabric', 'nodes', *more])}: {text}")
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spent.items())
    console.print(f"time: {parts}. Results: {folder.folder}")
