"""The unmodified gpulab-cli, in its own Python environment: it pins libraries that the rest cannot use."""

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
from pathlib import Path
from typing import Any

from cluster.core.config import ROOT
from cluster.core.errors import InfraError, UserError
from cluster.core.process import die_with_parent, run_logged
from cluster.core.sections import Gpulab
from cluster.core.state import CACHE
from cluster.providers import certificate

LOCK = ROOT / "requirements/gpulab.lock"
TIMEOUT = 120
# What a job's state.status can be once it is over.
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
        print(json.dumps({"job": number, "where": where, "what": first["msg"]}))
        break
"""


def environment_dir() -> Path:
    return CACHE / f"gpulab-cli-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]}"


def ensure(log: Path) -> Path:
    """The folder of gpulab-cli's environment, made first where it is missing."""
    target = environment_dir()
    if (target / ".complete").exists():
        return target
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
    """Hold job definitions against the CLI's own schema; a UserError names the job and the field."""
    done = subprocess.run(
        [ensure(log) / "bin/python", "-c", VALIDATE],
        input=json.dumps(definitions),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InfraError(f"gpulab-cli's schema could not be asked: {done.stderr.strip().splitlines()[-1]}")
    if done.stdout:
        problem = json.loads(done.stdout)
        name = definitions[problem["job"]].get("name")
        raise UserError(f"GPULab job {name}: {problem['where']}: {problem['what']}")


class Cli:
    """The commands we use. Every call is a process of its own, as a user would type it."""

    def __init__(self, settings: Gpulab, folder: Path) -> None:
        self.settings = settings
        self.log_file = folder / "logs/gpulab.log"
        self.home = folder / "gpulab-home"

    def check(self) -> None:
        """What must be right before anything is sent."""
        certificate.check(self.settings.pem, "cluster.gpulab.pem")

    def _environment(self) -> dict[str, str]:
        # Its own home: the CLI edits ~/.ssh/config. Secrets go by the environment, never by arguments.
        self.home.mkdir(parents=True, exist_ok=True)
        values = {name: value for name, value in os.environ.items() if name.lower() != "https_proxy"}
        values |= {"HOME": str(self.home), "GPULAB_CERT": str(Path(self.settings.pem).expanduser())}
        secret = certificate.password(self.settings.password_file, "cluster.gpulab.password_file")
        if secret:
            values["GPULAB_PASSWORD"] = secret
        return values

    def _call(self, *arguments: str) -> str:
        self.check()
        argv = [str(ensure(self.log_file) / "bin/gpulab-cli"), *arguments]
        try:
            done = subprocess.run(
                argv,
                env=self._environment(),
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                stdin=subprocess.DEVNULL,
                preexec_fn=die_with_parent,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise InfraError(f"gpulab {arguments[0]}: no answer within {TIMEOUT} s") from None
        if done.returncode:
            raise refusal(arguments[0], done.stderr or done.stdout)
        return done.stdout

    def submit(self, file: Path) -> str:
        """Submit held; return the job's id."""
        return self._call("submit", "--project", self.settings.project, "--hold", str(file)).strip().splitlines()[-1]

    def release(self, job: str) -> None:
        self._call("release", job)

    def cancel(self, job: str) -> None:
        self._call("cancel", job)

    def log(self, job: str) -> str:
        """Empty while there is none: then the CLI asks again without end and without a pause, so it is stopped."""
        self.check()
        argv = [str(ensure(self.log_file) / "bin/gpulab-cli"), "log", job]
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(
                argv,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=die_with_parent,
            )
            guard = threading.Timer(TIMEOUT, process.kill)
            guard.start()
            try:
                said = ""
                for line in process.stderr or ():
                    said += line
                    if "No log data available" in line:
                        return ""
                if process.wait():
                    raise refusal("log", said)
            finally:
                guard.cancel()
                process.kill()
                process.wait()
            out.seek(0)
            return out.read()

    def look(self, job: str) -> tuple[str, bool]:
        """A word of JobStatus, in capitals without spaces, and whether the job has run. `wait` will not do: it exits 0
        for a failed job."""
        try:
            state = json.loads(self._call("jobs", "-r", job))["state"]
            return str(state["status"]).upper().replace(" ", ""), bool(state["eventTimes"].get("RUNNING"))
        except (ValueError, KeyError, TypeError):
            raise InfraError(f"gpulab jobs: the answer about {job} is not a job") from None

    def status(self, job: str) -> str:
        return self.look(job)[0]

    def mine(self) -> dict[str, str]:
        """Name -> id of this account's latest jobs."""
        content = json.loads(self._call("jobs", "-U", "-r", "-c", "200"))
        return {str(job["name"]): str(job["uuid"]) for job in content}


def refusal(command: str, output: str) -> UserError | InfraError:
    """What the CLI said, in one line, and whose fault it is."""
    text = " ".join(output.split())
    if "expired" in text and "certificate" in text:
        return UserError("cluster.gpulab.pem: the certificate has expired; download a new one from the portal")
    if "need to specify the correct password" in text or "Bad password provided" in text:
        return UserError(
            "cluster.gpulab.password_file: the certificate's password is missing or wrong; "
            "write it there or set TESTBED_PEM_PASSWORD"
        )
    if "No permission to submit" in text:
        return UserError("cluster.gpulab.project: GPULab refuses jobs in this project (403); correct it or join it")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "no output")
    return InfraError(f"gpulab {command}: {telling.removeprefix('Error: ')[:300]}")
