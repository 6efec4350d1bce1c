"""Run a set of jobs as one: submitted held, released together, watched by their real state, ended together.

GPULab has no gang scheduling: some jobs of a set may run while others wait. So there is a time by which all must run,
and whatever goes wrong with one ends all.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cluster.core.errors import InfraError, UserError
from cluster.providers.gpulab.cli import FINAL, Cli
from cluster.providers.gpulab.ledger import Ledger

# Polls in a row that may fail before a set is given up: one 500 is no reason to throw away an hour of GPUs.
PATIENCE = 3
# After the first job is done the others have this long.
LAST_SECONDS = 60
CANCEL_SECONDS = 60
Out = Callable[[str], None]
Answer = TypeVar("Answer")


@dataclass
class Job:
    name: str
    id: str
    status: str = "ONHOLD"
    shown: int = 0  # lines of its log already handed on


@dataclass
class Gang:
    cli: Cli
    ledger: Ledger
    out: Out
    logs: Path
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, definitions: list[dict[str, Any]]) -> None:
        """Return when all jobs FINISHED; otherwise end all of them and raise one line that says which job and why."""
        jobs: list[Job] = []
        names = {str(definition["name"]) for definition in definitions}
        try:
            for definition in definitions:
                jobs.append(self.submit(definition))
            for job in jobs:
                self.cli.release(job.id)
            self.wait_for_start(jobs)
            self.follow(jobs)
        except (InfraError, UserError) as error:
            self.collect(jobs)
            try:
                end_all(self.cli, self.ledger, names)
            except (InfraError, UserError) as second:
                raise InfraError(f"{error}. And then: {second}") from None
            raise
        self.collect(jobs)

    def submit(self, definition: dict[str, Any]) -> Job:
        name = str(definition["name"])
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(definition, file)
            file.flush()
            self.ledger.asked(name)
            try:
                identifier = self.cli.submit(Path(file.name))
            except UserError:
                # A refusal, not a broken connection: there is no job.
                self.ledger.refused(name)
                raise
        self.ledger.submitted(name, identifier)
        return Job(name, identifier)

    def wait_for_start(self, jobs: list[Job]) -> None:
        limit = self.cli.settings.start_minutes * 60
        deadline = time.monotonic() + limit
        while True:
            self.poll(jobs)
            waiting = [job for job in jobs if job.status not in ("RUNNING", "FINISHED")]
            if not waiting:
                return
            self.out(f"{len(jobs) - len(waiting)} of {len(jobs)} jobs run; {waiting[0].name} is {waiting[0].status}")
            if time.monotonic() > deadline:
                raise InfraError(
                    f"GPULab job {waiting[0].name} is still {waiting[0].status} after {limit // 60} minutes; "
                    "all jobs of the set are cancelled; ask for fewer GPUs or raise cluster.gpulab.start_minutes"
                )
            self.pause()

    def follow(self, jobs: list[Job]) -> None:
        first = jobs[0]
        deadline = time.monotonic() + self.cli.settings.minutes * 60
        while True:
            self.poll(jobs)
            if not self.show(first):
                self.out(f"{first.name} is {first.status}")
            left = [job for job in jobs if job.status != "FINISHED"]
            if not left:
                return
            if first.status == "FINISHED":
                deadline = min(deadline, time.monotonic() + LAST_SECONDS)
            if time.monotonic() > deadline:
                raise InfraError(f"GPULab job {left[0].name} did not end in time; all jobs of the set are cancelled")
            self.pause()

    def pause(self) -> None:
        if self.stop.wait(self.cli.settings.poll_seconds):
            raise InfraError("stopped; all jobs of the set are cancelled")

    def poll(self, jobs: list[Job]) -> None:
        for job in jobs:
            if job.status in FINAL:
                continue
            job.status, ran = self.patiently(partial(self.cli.look, job.id))
            if job.status in FINAL:
                self.ledger.ended(job.name, job.status)
            if job.status in FINAL - {"FINISHED"}:
                where = "while it ran" if ran else "in the queue"
                raise InfraError(
                    f"GPULab job {job.name} ({job.id}) {job.status} {where}: "
                    f"{self.last_words(job)}; all jobs of the set are cancelled"
                )
            if job.status in ("MUSTHALT", "HALTING"):
                raise InfraError(
                    f"GPULab job {job.name} ({job.id}) is being halted to make room for others; "
                    "all jobs of the set are cancelled; run it again later"
                )

    def patiently(self, ask: Callable[[], Answer]) -> Answer:
        for attempt in range(PATIENCE):
            try:
                return ask()
            except InfraError:
                if attempt + 1 == PATIENCE:
                    raise
                self.pause()
        raise AssertionError

    def show(self, job: Job) -> bool:
        """Hand on what is new in a job's log; whether there was anything."""
        lines = self.patiently(partial(self.cli.log, job.id)).splitlines()
        for line in lines[job.shown :]:
            self.out(line)
        fresh, job.shown = len(lines) > job.shown, len(lines)
        return fresh

    def last_words(self, job: Job) -> str:
        try:
            lines = [line.strip() for line in self.cli.log(job.id).splitlines() if line.strip()]
        except (InfraError, UserError):
            lines = []
        if any("/opt/bench-worker/" in line and "can't open file" in line for line in lines):
            return "the image holds another version of the worker; make training-image, push it, name it in cluster.yml"
        telling = [line for line in lines if "rror" in line and "@bench" not in line]
        return (telling or lines or ["it left no log"])[-1][:300]

    def collect(self, jobs: list[Job]) -> None:
        """Keep every job's log; a log that cannot be had is no reason to leave jobs running."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for job in jobs:
            try:
                (self.logs / f"{job.name}.log").write_text(self.cli.log(job.id))
            except (InfraError, UserError) as error:
                (self.logs / f"{job.name}.log").write_text(f"the log could not be had: {error}\n")


def end_all(cli: Cli, ledger: Ledger, names: set[str] | None = None) -> None:
    """Cancel what the ledger says is open, or of that the jobs of these names; InfraError names what may still run."""
    left: list[str] = []
    entries = [entry for entry in ledger.open() if names is None or entry.name in names]
    lost = [entry.name for entry in entries if not entry.id]
    known = cli.mine() if lost else {}
    cancelled: list[tuple[str, str]] = []
    for entry in entries:
        identifier = entry.id or known.get(entry.name, "")
        if not identifier:
            ledger.refused(entry.name)
            continue
        try:
            status = cli.status(identifier)
            if status in FINAL:
                ledger.ended(entry.name, status)
                continue
            cli.cancel(identifier)
            cancelled.append((entry.name, identifier))
        except (InfraError, UserError) as error:
            left.append(f"{entry.name} ({identifier}): {error}")
    deadline = time.monotonic() + CANCEL_SECONDS
    for name, identifier in cancelled:
        try:
            while (status := cli.status(identifier)) not in FINAL:
                if time.monotonic() > deadline:
                    raise InfraError(f"still {status}")
                time.sleep(cli.settings.poll_seconds)
            ledger.ended(name, status)
        except (InfraError, UserError) as error:
            left.append(f"{name} ({identifier}): {error}")
    if left:
        raise InfraError(f"GPULab jobs may still run: {'; '.join(left)}; run `make destroy` again")
