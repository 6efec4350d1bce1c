"""Read a run from its folder or file, and list what could not be read."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from bench.results import provenance, store
from bench.results.points import Table, tabulate
from bench.results.provenance import FIRST
from bench.results.store import TRIALS, read_trials
from bench.results.trial import Trial
from cluster.core import files
from cluster.core.contract import TransportName
from cluster.core.errors import UserError

TRIAL_ID = re.compile(r"[0-9a-f]{6,12}")


@dataclass
class Run:
    name: str
    folder: Path
    trials: list[Trial] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    # Every environment that trials were measured in: name of its file -> content. `provenance` is the last one.
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    capacities: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.status == "ok"]

    def table(self) -> Table:
        return tabulate(self.trials, strong=self.plan.get("scaling") == "strong", gpu=self.gpu)

    @property
    def gpu(self) -> str:
        """The GPU model of the nodes, if the provenance names exactly one."""
        clusters = [provenance.get("nodes") for provenance in self.environments.values()]
        nodes = [node for cluster in clusters if isinstance(cluster, dict) for node in cluster.values()]
        found = {str(node.get("gpu_model") or "none") for node in nodes if isinstance(node, dict)} - {"none"}
        return found.pop()[:40].upper() if len(found) == 1 else ""

    def transport(self, fabric: str) -> str | None:
        """The transport of a fabric, as the first provenance records it: later trials record their own."""
        fabrics = next(iter(self.environments.values()), {}).get("fabrics")
        described = fabrics.get(fabric) if isinstance(fabrics, dict) else None
        found = described.get("transport") if isinstance(described, dict) else None
        return found if found in get_args(TransportName) else None

    def add_transports(self) -> None:
        """Points of schema 1 have no transport: use that of the provenance, or else the default, tcp."""
        for number, trial in enumerate(self.trials):
            found = self.transport(trial.point.fabric)
            if found and "transport" not in trial.point.model_fields_set:
                point = trial.point.model_copy(update={"transport": found})
                self.trials[number] = trial.model_copy(update={"point": point})

    def drop_foreign_links(self) -> None:
        """Earlier versions applied what a deploy measured on the active fabric to every fabric."""
        for number, trial in enumerate(self.trials):
            cluster = self.environments.get(trial.provenance or FIRST, {}).get("cluster")
            active = cluster.get("active_fabric") if isinstance(cluster, dict) else None
            if active and trial.link is None and trial.point.fabric != active:
                self.trials[number] = trial.model_copy(update={"link_gbps": None})

    @property
    def failed(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.status == "failed"]


def run_folders() -> list[Path]:
    """Every run under results/, oldest first."""
    files = [path for path in store.RESULTS.glob(f"*/*/{TRIALS}") if not path.parent.is_symlink()]
    return [path.parent for path in sorted(files, key=lambda path: (path.stat().st_mtime, str(path)))]


def find_run(text: str, field: str = "RUN") -> Path:
    """Resolve RUN (or the option `field`): a run folder, a trials file, `latest`, or `results/<env>/latest`."""
    path = Path(text)
    if path.name == "latest" and not path.exists():
        inside = path.parent.resolve()
        folders = [one for one in run_folders() if text == "latest" or one.resolve().parent == inside]
        if folders:
            return folders[-1]
        where = f"no run under {store.RESULTS.name if text == 'latest' else path.parent}/ yet"
        raise UserError(f"{field}: {where}; start one with `make bench`, or name a run folder")
    if path.is_file():
        return path
    if not text or not path.exists():
        raise UserError(f"{field}: {text} does not exist; name a run folder (results/<env>/<run>) or `latest`")
    if not (path / TRIALS).is_file():
        raise UserError(f"{field}: {text} is not a run: it has no {TRIALS}; name a folder like results/<env>/<run>")
    return path


def load(text: str | Path, field: str = "RUN") -> Run:
    path = find_run(str(text), field)
    file = path if path.is_file() else path / TRIALS
    folder = file.parent
    name = folder.resolve().name if file.name == TRIALS else file.stem
    trials, problems = read_trials(file)
    if path.is_file() and not trials:
        raise UserError(f"{field}: {text} is not a run: no line in it is a trial; name a run folder or its {TRIALS}")
    run = Run(name=name, folder=folder, trials=trials, problems=problems)
    if file.name == TRIALS:
        run.plan = read_object(folder / "plan.json", run.problems)
        run.capacities = read_object(folder / "capacities.json", run.problems, needed=False)
        read_environments(run)
        run.add_transports()
        run.drop_foreign_links()
    if not trials:
        why = "nothing was measured yet, or it is another program's file"
        run.problems.append(f"{TRIALS} holds no readable trial: {why}")
    return run


def print_problems(run: Run) -> None:
    """For commands that do not show them in their output."""
    for text in run.problems:
        print(f"bench: {run.name}: {text}", file=sys.stderr)


def read_environments(run: Run) -> None:
    names = {trial.provenance or FIRST: None for trial in run.trials} or {FIRST: None}
    # A rerun appends its trials, so the last name is the newest.
    for name in sorted(names, key=lambda name: name != FIRST):
        run.environments[name] = read_object(run.folder / name, run.problems)
    run.provenance = run.environments[next(reversed(names))]
    known = [(name, content) for name, content in run.environments.items() if content]
    for (first, old), (second, new) in pairwise(known):
        changed = provenance.differences(old, new)
        if changed:
            listed = "; ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
            run.problems.append(f"trials were measured in different environments ({first}, {second}): {listed}")


def read_object(path: Path, problems: list[str], needed: bool = True) -> dict[str, Any]:
    try:
        return files.mapping(path) if needed or path.is_file() else {}
    except UserError as error:
        problems.append(f"{error}; continuing without it")
        return {}


def find_trial(text: str) -> tuple[Run, Trial] | None:
    """Find `RUN/ID` or a bare trial id, newest run first. None if the text is not a trial id."""
    head, _, tail = text.rpartition("/")
    if not TRIAL_ID.fullmatch(tail) or Path(text).exists():
        return None
    candidates = [find_run(head)] if head else reversed(run_folders())
    for folder in candidates:
        file = folder if folder.is_file() else folder / TRIALS
        if tail.encode() not in file.read_bytes():
            continue
        run = load(folder)
        matches = [trial for trial in run.trials if trial.id.startswith(tail)]
        if len(matches) > 1:
            raise UserError(f"TRIAL: {tail} matches {len(matches)} trials of {run.name}; give more digits")
        if matches:
            return run, matches[0]
    where = head or store.RESULTS.name
    raise UserError(f"TRIAL: no trial {tail} in {where}; ids are in trials.jsonl and in the report's table")
