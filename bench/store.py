"""The folder of one run: results/<env>/<run>/ with plan.json, provenance.json, trials.jsonl, logs and step times.

trials.jsonl is append-only and flushed per trial; a rerun reads it and skips what is there.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.trial import Trial
from cluster.config import ROOT
from cluster.errors import InfraError

RESULTS = ROOT / "results"


def write_error(path: Path, error: OSError) -> InfraError:
    reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
    return InfraError(f"{path}: cannot write: {reason}; trials recorded so far are intact, run the same command again")


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials_file = folder / "trials.jsonl"

    def prepare(self, plan: dict[str, Any], provenance: dict[str, Any]) -> None:
        """Make the folder, or check that it belongs to the same plan."""
        plan_file = self.folder / "plan.json"
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            (self.folder / "steps").mkdir(exist_ok=True)
            plan_file.write_text(json.dumps(plan, indent=1))
            (self.folder / "provenance.json").write_text(json.dumps(provenance, indent=1))
        except OSError as error:
            raise write_error(self.folder, error) from None

    def trials(self) -> list[Trial]:
        """What is recorded; a last line cut off by a crash is not."""
        if not self.trials_file.exists():
            return []
        found = []
        for line in self.trials_file.read_text().splitlines():
            try:
                found.append(Trial.model_validate_json(line))
            except ValidationError:
                continue
        return found

    def done(self) -> set[str]:
        return {trial.id for trial in self.trials() if trial.status == "ok"}

    def append(self, trial: Trial) -> None:
        line = trial.model_dump_json() + "\n"
        try:
            with self.trials_file.open("ab") as file:
                start = file.tell()
                # A line cut off by an earlier crash must not swallow this one.
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

    def write_steps(self, name: str, ranks: list[dict[str, Any]]) -> str:
        relative = f"steps/{name}.json"
        try:
            (self.folder / relative).write_text(json.dumps(ranks))
        except OSError as error:
            raise write_error(self.folder / relative, error) from None
        return relative
