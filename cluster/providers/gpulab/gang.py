"""Run a set of jobs together: submit all on hold, release them at once, watch their state, end them together.

GPULab has no gang scheduling: some jobs of a set may run while others wait in the queue. So all must run before a
deadline, and a failure of one job ends all of them.
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

from cluster.core.config import layout
from cluster.core.errors import InfraError, UserError
from cluster.providers import testbed
from cluster.providers.gpulab.cli import FINAL, Cli
from cluster.providers.gpulab.ledger import Ledger

# A set is given up after this many failed polls in a row: one HTTP 500 must not waste an hour of GPU time.
POLL_ATTEMPTS = 3
# Time that the other jobs have to end after the first job has ended.
END_SECONDS = 60
CANCEL_SECONDS = 60
PrintLine = Callable[[str], None]
Answer = TypeVar("Answer")


@dataclass
class SubmittedJob:
    name: str
    id: str
    status: str = "ONHOLD"
    printed_lines: int = 0

    def __str__(self) -> str:
        return f"GPULab job {self.name} ({self.id})"


@dataclass
class Gang:
    cli: Cli
    ledger: Ledger
    out: PrintLine
    logs: Path
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, definitions: list[dict[str, Any]]) -> None:
        """Return when all jobs have FINISHED; otherwise cancel all of them and raise an error that names the job."""
        jobs: list[SubmittedJob] = []
        names = {str(definition["name"]) for definition in definitions}
        try:
            for definition in definitions:
                jobs.append(self.submit(definition))
            for job in jobs:
                self.cli.release(job.id)
            self.wait_for_start(jobs)
            self.wait_for_end(jobs)
        except (InfraError, UserError) as error:
            self.save_logs(jobs)
            try:
                cancel_open_jobs(self.cli, self.ledger, names)
            except (InfraError, UserError) as second:
                raise InfraError(f"{error}; then: {second}") from None
            raise
        self.save_logs(jobs)

    def submit(self, definition: dict[str, Any]) -> SubmittedJob:
        name = str(definition["name"])
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(definition, file)
            file.flush()
            self.ledger.requested(name)
            try:
                identifier = self.cli.submit(Path(file.name))
            except UserError:
                # GPULab refused the job, so it does not exist. After a broken connection it might.
                self.ledger.refused(name)
                raise
        self.ledger.submitted(name, identifier)
        return SubmittedJob(name, identifier)

    def wait_for_start(self, jobs: list[SubmittedJob]) -> None:
        limit = self.cli.section.start_minutes * 60
        deadline = time.monotonic() + limit
        while True:
            self.poll(jobs)
            waiting = [job for job in jobs if job.status not in ("RUNNING", "FINISHED")]
            if not waiting:
                return
            first = waiting[0]
            self.out(f"{len(jobs) - len(waiting)} of {len(jobs)} jobs are running; {first.name} is {first.status}")
            if time.monotonic() > deadline:
                raise InfraError(
                    f"GPULab job {first.name} is still {first.status} after {limit // 60} minutes; "
                    "all jobs of the set are cancelled; use fewer GPUs or raise cluster.gpulab.start_minutes"
                )
            self.pause()

    def wait_for_end(self, jobs: list[SubmittedJob]) -> None:
        first = jobs[0]
        deadline = time.monotonic() + self.cli.section.minutes * 60
        while True:
            self.poll(jobs)
            if not self.print_new_lines(first):
                self.out(f"{first.name} is {first.status}")
            pending = [job for job in jobs if job.status != "FINISHED"]
            if not pending:
                return
            if first.status == "FINISHED":
                deadline = min(deadline, time.monotonic() + END_SECONDS)
            if time.monotonic() > deadline:
                raise InfraError(f"GPULab job {pending[0].name} did not end in time; all jobs of the set are cancelled")
            self.pause()

    def pause(self) -> None:
        if self.stop.wait(self.cli.section.poll_seconds):
            raise InfraError("stopped; all jobs of the set are cancelled")

    def poll(self, jobs: list[SubmittedJob]) -> None:
        for job in jobs:
            if job.status in FINAL:
                continue
            state = self.with_retries(partial(self.cli.state, job.id))
            job.status = state.status
            if job.status in FINAL:
                self.ledger.ended(job.name, job.status)
            if job.status in FINAL - {"FINISHED"}:
                when = "while it ran" if state.started else "in the queue"
                reason = self.failure_reason(job)
                raise InfraError(f"{job} {job.status} {when}: {reason}; all jobs of the set are cancelled")
            if job.status in ("MUSTHALT", "HALTING"):
                raise InfraError(
                    f"{job} is being halted to make room for others; all jobs of the set are cancelled; try again later"
                )

    def with_retries(self, request: Callable[[], Answer]) -> Answer:
        for _ in range(POLL_ATTEMPTS - 1):
            try:
                return request()
            except InfraError:
                self.pause()
        return request()

    def print_new_lines(self, job: SubmittedJob) -> bool:
        """Print the lines of a job's log that were not printed yet; return whether there were any."""
        lines = self.with_retries(partial(self.cli.log, job.id)).splitlines()
        new = lines[job.printed_lines :]
        for line in new:
            self.out(line)
        job.printed_lines = len(lines)
        return bool(new)

    def failure_reason(self, job: SubmittedJob) -> str:
        try:
            log = self.cli.log(job.id)
        except (InfraError, UserError):
            log = ""
        if any(f"{layout()['worker']}/" in line and "can't open file" in line for line in log.splitlines()):
            return "its image has another version of the worker; run `make training-image`, push it, update cluster.yml"
        return testbed.error_line("\n".join(line for line in log.splitlines() if "@bench" not in line)) or "empty log"

    def save_logs(self, jobs: list[SubmittedJob]) -> None:
        """Keep every job's log. A log that cannot be read must not keep jobs running."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for job in jobs:
            try:
                text = self.cli.log(job.id)
            except (InfraError, UserError) as error:
                text = f"cannot read the log: {error}\n"
            (self.logs / f"{job.name}.log").write_text(text)


def cancel_open_jobs(cli: Cli, ledger: Ledger, names: set[str] | None = None) -> None:
    """Cancel the open jobs of the ledger, or only those with these names; InfraError names jobs that may still run."""
    problems: list[str] = []
    entries = [entry for entry in ledger.open() if names is None or entry.name in names]
    own_jobs = cli.own_jobs() if any(not entry.id for entry in entries) else {}
    cancelled: list[tuple[str, str]] = []
    for entry in entries:
        identifier = entry.id or own_jobs.get(entry.name, "")
        if not identifier:
            ledger.refused(entry.name)
            continue
        try:
            status = cli.state(identifier).status
            if status in FINAL:
                ledger.ended(entry.name, status)
                continue
            cli.cancel(identifier)
            cancelled.append((entry.name, identifier))
        except (InfraError, UserError) as error:
            problems.append(f"{entry.name} ({identifier}): {error}")
    deadline = time.monotonic() + CANCEL_SECONDS
    for name, identifier in cancelled:
        try:
            while (status := cli.state(identifier).status) not in FINAL:
                if time.monotonic() > deadline:
                    raise InfraError(f"still {status}")
                time.sleep(cli.section.poll_seconds)
            ledger.ended(name, status)
        except (InfraError, UserError) as error:
            problems.append(f"{name} ({identifier}): {error}")
    if problems:
        raise InfraError(f"GPULab jobs may still run: {'; '.join(problems)}; run `make destroy` again")
