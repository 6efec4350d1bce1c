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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cluster.core.config import layout
from cluster.core.errors import InfraError, UserError
from cluster.providers import testbed
from cluster.providers.gpulab.cli import FINAL, Cli
from cluster.providers.ledger import Ledger

# A set is given up after this many failed polls in a row: one HTTP 500 must not waste an hour of GPU time.
POLL_ATTEMPTS = 3
# Time that the other jobs have to end after the first job has ended.
END_SECONDS = 60
CANCEL_SECONDS = 60
CANCELLED = "all jobs of the set are cancelled"
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
    stop: threading.Event

    def run(self, definitions: list[dict[str, Any]]) -> None:
        """Return when all jobs have FINISHED; otherwise cancel all of them and raise an error that names the job."""
        jobs: list[SubmittedJob] = []
        try:
            for definition in definitions:
                jobs.append(self.submit(definition))
            for job in jobs:
                self.cli.call("release", job.id)
            self.wait_for_start(jobs)
            self.wait_for_end(jobs)
        # Whoever read our output may have been killed: the next line then raises BrokenPipeError.
        except (InfraError, UserError, BrokenPipeError) as error:
            self.save_logs(jobs)
            try:
                cancel_open_jobs(self.cli, self.ledger, {str(definition["name"]) for definition in definitions})
            except (InfraError, UserError) as second:
                raise InfraError(f"{error}; then: {second}") from None
            raise
        self.save_logs(jobs)

    def submit(self, definition: dict[str, Any]) -> SubmittedJob:
        name = str(definition["name"])
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(definition, file)
            file.flush()
            self.ledger.add("asked", name)
            try:
                identifier = self.cli.submit(Path(file.name))
            except UserError:
                # GPULab refused the job, so it does not exist. After a broken connection it might.
                self.ledger.add("refused", name)
                raise
        self.ledger.add("submitted", name, id=identifier)
        return SubmittedJob(name, identifier)

    def wait_for_start(self, jobs: list[SubmittedJob]) -> None:
        minutes = self.cli.section.start_minutes
        deadline = time.monotonic() + minutes * 60
        while True:
            self.poll(jobs)
            waiting = [job for job in jobs if job.status not in ("RUNNING", "FINISHED")]
            if not waiting:
                return
            first = waiting[0]
            self.out(f"{len(jobs) - len(waiting)} of {len(jobs)} jobs are running; {first.name} is {first.status}")
            if time.monotonic() > deadline:
                fix = "use fewer GPUs or raise cluster.gpulab.start_minutes"
                waited = f"is still {first.status} after {minutes} minutes"
                raise InfraError(f"GPULab job {first.name} {waited}; {CANCELLED}; {fix}")
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
                raise InfraError(f"GPULab job {pending[0].name} did not end in time; {CANCELLED}")
            self.pause()

    def pause(self) -> None:
        if self.stop.wait(self.cli.section.poll_seconds):
            raise InfraError(f"stopped; {CANCELLED}")

    def poll(self, jobs: list[SubmittedJob]) -> None:
        for job in jobs:
            if job.status in FINAL:
                continue
            state = self.with_retries(self.cli.state, job.id)
            job.status = state.status
            if job.status in FINAL:
                self.ledger.add("ended", job.name, status=job.status)
            if job.status in FINAL - {"FINISHED"}:
                when = "while it ran" if state.started else "in the queue"
                raise InfraError(f"{job} {job.status} {when}: {self.failure_reason(job)}; {CANCELLED}")
            if job.status in ("MUSTHALT", "HALTING"):
                raise InfraError(f"{job} is being halted to make room for others; {CANCELLED}; try again later")

    def with_retries(self, request: Callable[[str], Answer], job: str) -> Answer:
        for _ in range(POLL_ATTEMPTS - 1):
            try:
                return request(job)
            except InfraError:
                self.pause()
        return request(job)

    def print_new_lines(self, job: SubmittedJob) -> bool:
        """Print the lines of a job's log that were not printed yet; return whether there were any."""
        lines = self.with_retries(self.cli.log, job.id).splitlines()
        new = lines[job.printed_lines :]
        for line in new:
            self.out(line)
        job.printed_lines = len(lines)
        return bool(new)

    def failure_reason(self, job: SubmittedJob) -> str:
        log = ""
        with suppress(InfraError, UserError):
            log = self.cli.log(job.id)
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
    problems: dict[str, str] = {}
    jobs = {name: identifier for name, identifier in ledger.open().items() if names is None or name in names}
    own_jobs = {} if all(jobs.values()) else cli.own_jobs()
    jobs = {name: identifier or own_jobs.get(name, "") for name, identifier in jobs.items()}
    for name, identifier in jobs.items():
        try:
            if not identifier:
                ledger.add("refused", name)
            elif cli.state(identifier).status not in FINAL:
                cli.call("cancel", identifier)
        except (InfraError, UserError) as error:
            problems[name] = f"{name} ({identifier}): {error}"
    deadline = time.monotonic() + CANCEL_SECONDS
    for name, identifier in jobs.items():
        if not identifier or name in problems:
            continue
        try:
            while (status := cli.state(identifier).status) not in FINAL:
                if time.monotonic() > deadline:
                    raise InfraError(f"still {status}")
                time.sleep(cli.section.poll_seconds)
            ledger.add("ended", name, status=status)
        except (InfraError, UserError) as error:
            problems[name] = f"{name} ({identifier}): {error}"
    if problems:
        raise InfraError(f"GPULab jobs may still run: {'; '.join(problems.values())}; run `make destroy` again")
