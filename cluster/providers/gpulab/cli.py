"""The unmodified gpulab-cli in its own virtual environment, because its pinned libraries conflict with ours."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO, Any

from typing_extensions import TypedDict

from cluster.core import files, sections
from cluster.core.config import ROOT
from cluster.core.errors import InfraError, UserError
from cluster.core.process import die_with_parent, run_logged
from cluster.core.state import CACHE
from cluster.providers import certificate, testbed

LOCK = ROOT / "requirements/gpulab.lock"
TIMEOUT = 120
# Values of a job's state.status after its end.
FINAL = {"FINISHED", "FAILED", "CANCELLED", "DELETED", "HALTED"}
VALIDATE = """
import json, sys
from pydantic import ValidationError
from imecilabt.gpulab.schemas.job2 import NewJobV4CLI
for number, job in enumerate(json.load(sys.stdin)):
    try:
        NewJobV4CLI.model_validate(job)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        print(json.dumps([number, f"{where}: {first['msg']}"]))
        break
"""


def ensure(log: Path) -> Path:
    """The virtual environment with gpulab-cli; created if it is missing."""
    target = CACHE / f"gpulab-cli-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "gpulab-cli.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / ".complete").exists():
            return target
        shutil.rmtree(target, ignore_errors=True)
        run_logged([sys.executable, "-m", "venv", target], log, os.environ, "venv for gpulab-cli")
        pip: list[str | Path] = [target / "bin/pip", "install", "--quiet", "--require-hashes", "--requirement", LOCK]
        run_logged(pip, log, os.environ, "pip install gpulab-cli")
        (target / ".complete").touch()
    return target


def validate(definitions: list[dict[str, Any]], log: Path) -> None:
    """Check job definitions with gpulab-cli's own schema; a UserError names the job and the field."""
    argv, data = [str(ensure(log) / "bin/python"), "-c", VALIDATE], json.dumps(definitions)
    done = subprocess.run(argv, input=data, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InfraError(f"cannot run gpulab-cli's schema: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    if done.stdout:
        number, problem = files.answer(done.stdout, "gpulab-cli's schema", tuple[int, str])
        raise UserError(f"GPULab job {definitions[number].get('name')}: {problem}")


@dataclass(frozen=True)
class JobState:
    """status is GPULab's JobStatus in capitals; started: whether the job has ever run."""

    status: str
    started: bool


class Job(TypedDict):
    name: str
    uuid: str


class Cli:
    """The commands that we use, each as its own process."""

    def __init__(self, section: sections.Gpulab, folder: Path) -> None:
        self.section = section
        self.log_file = folder / "logs/gpulab.log"
        self.home = folder / "gpulab-home"

    def check(self) -> None:
        """Check the certificate before anything is sent."""
        certificate.check(self.section.pem, "cluster.gpulab.pem")

    def _environment(self) -> dict[str, str]:
        # A separate HOME, because the CLI edits ~/.ssh/config. Secrets are never passed as arguments.
        self.home.mkdir(parents=True, exist_ok=True)
        values = {name: value for name, value in os.environ.items() if name.lower() != "https_proxy"}
        values |= {"HOME": str(self.home), "GPULAB_CERT": str(Path(self.section.pem).expanduser())}
        if secret := certificate.password(self.section.password_file, "cluster.gpulab.password_file"):
            values["GPULAB_PASSWORD"] = secret
        return values

    def _start(self, *arguments: str, stdout: int | IO[str] = PIPE) -> subprocess.Popen[str]:
        self.check()
        argv, env = [str(ensure(self.log_file) / "bin/gpulab-cli"), *arguments], self._environment()
        return subprocess.Popen(
            argv, env=env, stdin=DEVNULL, stdout=stdout, stderr=PIPE, text=True, preexec_fn=die_with_parent
        )

    def call(self, *arguments: str) -> str:
        with self._start(*arguments) as process:
            try:
                out, problem = process.communicate(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                raise InfraError(f"gpulab {arguments[0]}: no answer within {TIMEOUT} s") from None
        if process.returncode:
            raise cli_error(arguments[0], problem or out)
        return out

    def submit(self, file: Path) -> str:
        """Submit a job on hold; return its id."""
        return self.call("submit", "--project", self.section.project, "--hold", str(file)).strip().splitlines()[-1]

    def log(self, job: str) -> str:
        """The job's log; "" if there is none yet. The CLI would then poll in a busy loop for ever, so it is killed."""
        with tempfile.TemporaryFile("w+") as out, self._start("log", job, stdout=out) as process:
            timer = threading.Timer(TIMEOUT, process.kill)
            timer.start()
            try:
                problem = ""
                for line in process.stderr or ():
                    problem += line
                    if "No log data available" in line:
                        return ""
                if process.wait():
                    raise cli_error("log", problem)
            finally:
                timer.cancel()
                process.kill()
            out.seek(0)
            return out.read()

    def state(self, job: str) -> JobState:
        """`gpulab-cli wait` cannot be used here: it exits with 0 for a failed job too."""
        try:
            state = files.answer(self.call("jobs", "-r", job), "gpulab jobs", dict[str, Any])["state"]
            status = str(state["status"]).upper().replace(" ", "")
            return JobState(status, bool(state["eventTimes"].get("RUNNING")))
        except (KeyError, TypeError, AttributeError):
            raise InfraError(f"gpulab jobs: unexpected output for job {job}") from None

    def own_jobs(self) -> dict[str, str]:
        """Name -> id of this account's latest jobs."""
        jobs = files.answer(self.call("jobs", "-U", "-r", "-c", "200"), "gpulab jobs", list[Job])
        return {job["name"]: job["uuid"] for job in jobs}


def cli_error(command: str, output: str) -> UserError | InfraError:
    """The CLI's error in one line: UserError if the user can correct it."""
    text = " ".join(output.split())
    if "expired" in text and "certificate" in text:
        return UserError(f"cluster.gpulab.pem: the certificate has expired; {certificate.DOWNLOAD}")
    if "need to specify the correct password" in text or "Bad password provided" in text:
        fix = "write it there or set TESTBED_PEM_PASSWORD"
        return UserError(f"cluster.gpulab.password_file: the certificate's password is missing or wrong; {fix}")
    if "No permission to submit" in text:
        return UserError("cluster.gpulab.project: GPULab refuses jobs in this project (403); correct it or join it")
    return InfraError(f"gpulab {command}: {testbed.error_line(output).removeprefix('Error: ') or 'no output'}")
