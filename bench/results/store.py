"""The folder of one run: results/<env>/<run>/ with plan.json, provenance.json, trials.jsonl, logs and step times.

trials.jsonl is append-only and flushed per trial. A rerun skips the trials that it contains. A provenance file is
written once: a sweep in another environment writes provenance-2.json, and each trial names its own.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.results import provenance
from bench.results.provenance import FIRST
from bench.results.trial import SCHEMA_VERSION, Trial
from bench.worker.protocol import RankReport
from cluster.core import files, paths
from cluster.core.errors import InfraError, UserError
from cluster.core.numbers import LARGEST, SMALLEST

RESULTS = paths.RESULTS
TRIALS = "trials.jsonl"


def write_error(path: Path, error: OSError) -> InfraError:
    reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
    return InfraError(f"{path}: cannot write: {reason}; trials recorded so far are intact, run the same command again")


class RunFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials_file = folder / TRIALS
        self.provenance: dict[str, Any] = {}

    def prepare(self, plan: dict[str, Any], provenance: dict[str, Any]) -> None:
        """Create the folder and write the plan. The provenance is written with the first trial."""
        self.provenance = provenance
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            (self.folder / "steps").mkdir(exist_ok=True)
            part = self.folder / "plan.json.part"
            part.write_text(json.dumps(plan, indent=1))
            part.replace(self.folder / "plan.json")
        except OSError as error:
            raise write_error(self.folder, error) from None

    @cached_property
    def provenance_file(self) -> str | None:
        """Name of the file that describes this sweep's environment; a new file if no earlier one does."""
        if not self.provenance:
            return None
        for number in count(1):
            path = self.folder / (FIRST if number == 1 else f"provenance-{number}.json")
            if not path.exists():
                try:
                    path.write_text(json.dumps(self.provenance, indent=1))
                except OSError as error:
                    raise write_error(path, error) from None
                return path.name
            with suppress(UserError):
                if not provenance.differences(files.mapping(path), self.provenance):
                    return path.name
        return None

    def trials(self) -> list[Trial]:
        """The last record of every trial."""
        return read_trials(self.trials_file)[0] if self.trials_file.exists() else []

    def problems(self) -> list[str]:
        """Lines of trials.jsonl that could not be read."""
        return read_trials(self.trials_file)[1] if self.trials_file.exists() else []

    def done(self) -> set[str]:
        return {trial.id for trial in self.trials() if trial.status == "ok"}

    def append(self, trial: Trial) -> None:
        line = trial.model_copy(update={"provenance": self.provenance_file}).model_dump_json() + "\n"
        try:
            with self.trials_file.open("ab") as file:
                start = file.tell()
                # An earlier crash may have left a line without its end: start a new one.
                if start and not self._ends_with_newline():
                    line = "\n" + line
                try:
                    file.write(line.encode())
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(self.trials_file, start)
                    raise
        except OSError as error:
            raise write_error(self.trials_file, error) from None

    def _ends_with_newline(self) -> bool:
        with self.trials_file.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def write_steps(self, name: str, ranks: list[RankReport]) -> str:
        relative = f"steps/{name}.json"
        try:
            (self.folder / relative).write_text(json.dumps([asdict(rank) for rank in ranks]))
        except OSError as error:
            raise write_error(self.folder / relative, error) from None
        return relative


def read_trials(file: Path) -> tuple[list[Trial], list[str]]:
    """The last record of every trial in the file, and one message per kind of bad line."""
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
            # A killed writer leaves a last line without a line feed.
            if number == len(lines):
                truncated = True
                continue
            reason = error.errors()[0]
            where = ".".join(str(part) for part in reason["loc"])
            bad.append((number, f"{where}: {reason['msg']}" if where else str(reason["msg"])))
            continue
        if reason_text := implausible(trial):
            bad.append((number, reason_text))
            continue
        newer += trial.schema_version > SCHEMA_VERSION
        # A rerun appends: the last record of a trial counts.
        trials.pop(trial.id, None)
        trials[trial.id] = trial
    problems = []
    if truncated:
        problems.append(f"the last line of {file.name} is cut off (the sweep was killed) and was left out")
    if bad:
        number, reason_text = bad[0]
        count = "1 line" if len(bad) == 1 else f"{len(bad)} lines"
        kind = "is not a trial and was" if len(bad) == 1 else "are not trials and were"
        problems.append(f"{count} of {file.name} {kind} left out; the first is line {number} ({reason_text[:160]})")
    if newer:
        newest = f"{newer} trials have a newer schema than {SCHEMA_VERSION}"
        problems.append(f"{newest}; update bench to read all their fields")
    return list(trials.values()), problems


def implausible(trial: Trial) -> str | None:
    """Describe the first value that no measurement can have: it would corrupt the figures of a report."""
    point = trial.point
    for name in ("nodes", "gpus_per_node", "batch", "rate_gbps"):
        if not 0 < (value := getattr(point, name)) < 1e12:
            return f"point.{name}: {value} is not possible"
    wrong = next((value for value in numbers(trial.model_dump()) if not 0 <= value < 1e18), None)
    if wrong is not None:
        return f"a measured value of {wrong} is not possible"
    for record in (trial.step_ms, trial.images_per_second):
        if record is not None and not SMALLEST <= record.median <= LARGEST:
            return f"a step time or throughput of {record.median:g} is not possible"
    return None


def numbers(value: Any) -> Iterator[float]:
    """Every number in a record except its loss, which may be negative."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name != "loss":
                yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, float):
        yield value
