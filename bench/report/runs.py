"""Reading a run: its folder or file, what could be read, and what could not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench import store
from bench.report.points import Table, tabulate
from bench.trial import SCHEMA_VERSION, Trial
from cluster.errors import UserError

TRIALS = "trials.jsonl"
TRIAL_ID = re.compile(r"[0-9a-f]{6,12}")


@dataclass
class Run:
    name: str
    folder: Path
    trials: list[Trial] = field(default_factory=list)
    plan: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    capacities: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.status == "ok"]

    def table(self) -> Table:
        return tabulate(self.trials, strong=self.plan.get("scaling") == "strong", gpu=self.gpu)

    @property
    def gpu(self) -> str:
        """The one GPU model that the run's nodes have, if they are all alike and say so."""
        nodes = self.provenance.get("nodes")
        described = [node for node in nodes.values() if isinstance(node, dict)] if isinstance(nodes, dict) else []
        found = {str(node.get("gpu_model") or "none") for node in described} - {"none"}
        return found.pop()[:40].upper() if len(found) == 1 else ""

    @property
    def failed(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.status == "failed"]


def run_folders(results: Path) -> list[Path]:
    """Every run under results/, oldest first."""
    files = [path for path in results.glob(f"*/*/{TRIALS}") if not path.parent.is_symlink()]
    return [path.parent for path in sorted(files, key=lambda path: (path.stat().st_mtime, str(path)))]


def find_run(text: str, results: Path | None = None) -> Path:
    """The path a user meant by RUN: a run folder, a trials file, or `latest`."""
    results = results or store.RESULTS
    if text == "latest":
        folders = run_folders(results)
        if not folders:
            raise UserError(f"RUN: no run under {results.name}/ yet; start one with `make bench`, or name a run folder")
        return folders[-1]
    path = Path(text)
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(f"RUN: {text} does not exist; name a run folder (results/<env>/<run>) or `latest`")
    if not (path / TRIALS).is_file():
        raise UserError(f"RUN: {text} is not a run: it has no {TRIALS}; name a folder like results/<env>/<run>")
    return path


def load(text: str | Path, results: Path | None = None) -> Run:
    path = find_run(str(text), results)
    file = path if path.is_file() else path / TRIALS
    folder = file.parent
    name = folder.resolve().name if file.name == TRIALS else file.stem
    trials, problems = read_trials(file)
    if path.is_file() and not trials:
        raise UserError(f"RUN: {text} is not a run: no line in it is a trial; name a run folder or its {TRIALS}")
    run = Run(name=name, folder=folder, trials=trials, problems=problems)
    if file.name == TRIALS:
        for part in ("plan", "provenance", "capacities"):
            setattr(run, part, read_object(folder / f"{part}.json", run.problems, needed=part != "capacities"))
    if not trials:
        run.problems.append(
            f"{TRIALS} holds no readable trial: nothing was measured yet, or it is another program's file"
        )
    return run


def read_object(path: Path, problems: list[str], needed: bool) -> dict[str, Any]:
    if not path.is_file():
        if needed:
            problems.append(f"{path.name} is missing")
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        problems.append(f"{path.name} is not valid JSON and was left out")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is not a JSON object and was left out")
        return {}
    return value


def read_trials(file: Path) -> tuple[list[Trial], list[str]]:
    """The last record of every trial in the file, and what was wrong with the other lines."""
    trials: dict[str, Trial] = {}
    bad: list[tuple[int, str]] = []
    newer = 0
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"RUN: {file} cannot be read: {error.strerror}") from error
    lines = data.split(b"\n")
    truncated = False
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            trial = Trial.model_validate_json(line)
        except ValidationError as error:
            # A line without its line feed is what a killed writer leaves: expected, and named as such.
            if number == len(lines):
                truncated = True
                continue
            reason = error.errors()[0]
            where = ".".join(str(part) for part in reason["loc"])
            bad.append((number, f"{where}: {reason['msg']}" if where else str(reason["msg"])))
            continue
        if fault := implausible(trial):
            bad.append((number, fault))
            continue
        newer += trial.schema_version > SCHEMA_VERSION
        # A rerun appends: the later record of the same trial replaces the earlier one.
        trials.pop(trial.id, None)
        trials[trial.id] = trial
    problems = []
    if truncated:
        problems.append(f"the last line of {file.name} is cut off (the writer was stopped); it was left out")
    if bad:
        number, reason_text = bad[0]
        count = "1 line" if len(bad) == 1 else f"{len(bad)} lines"
        kind = "is not a trial" if len(bad) == 1 else "are not trials"
        problems.append(f"{count} of {file.name} {kind} and left out; the first is line {number} ({reason_text[:160]})")
    if newer:
        problems.append(f"{newer} trials are of a newer schema than {SCHEMA_VERSION}; update to read them fully")
    return list(trials.values()), problems


def implausible(trial: Trial) -> str | None:
    """The first value that no measurement can have; arithmetic on it would spoil the whole report."""
    point = trial.point
    for name, value in (
        ("nodes", point.nodes),
        ("gpus_per_node", point.gpus_per_node),
        ("batch", point.batch),
        ("rate_gbps", point.rate_gbps),
    ):
        if not 0 < value < 1e12:
            return f"point.{name}: {value} is not possible"
    wrong = next((value for value in numbers(trial.model_dump()) if not 0 <= value < 1e18), None)
    if wrong is not None:
        return f"a measured value of {wrong} is not possible"
    if any(record.median <= 0 for record in (trial.step_ms, trial.images_per_second) if record is not None):
        return "a step that takes no time or trains no image is not possible"
    return None


def numbers(value: Any) -> Iterator[float]:
    """Every number in a record but its loss, which alone may be negative or lost to overflow."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name != "loss":
                yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, float):
        yield value


def find_trial(text: str, results: Path | None = None) -> tuple[Run, Trial] | None:
    """The run and trial meant by `RUN/ID` or by a bare trial id, newest run first; None when text is no trial."""
    results = results or store.RESULTS
    head, _, tail = text.rpartition("/")
    if not TRIAL_ID.fullmatch(tail) or Path(text).exists():
        return None
    candidates = [find_run(head, results)] if head else list(reversed(run_folders(results)))
    for folder in candidates:
        file = folder if folder.is_file() else folder / TRIALS
        if tail.encode() not in file.read_bytes():
            continue
        run = load(folder, results)
        matches = [trial for trial in run.trials if trial.id.startswith(tail)]
        if len(matches) > 1:
            raise UserError(f"TRIAL: {tail} fits {len(matches)} trials of {run.name}; give more digits")
        if matches:
            return run, matches[0]
    raise UserError(
        f"TRIAL: no trial {tail} in {head or results.name}; ids are in trials.jsonl and in the report's table"
    )
