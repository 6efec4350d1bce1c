"""Submit a job, follow its output and state, and end it. A job goes on when the process that follows it is killed."""

from __future__ import annotations

import io
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.worker import slurm_queue
from bench.worker.protocol import Allocation, emit
from cluster.core import files, worker_files
from cluster.core.errors import InfraError, UserError
from cluster.core.slurm_section import Slurm
from cluster.providers.ledger import Ledger
from cluster.providers.slurm import script
from cluster.providers.slurm.login import Login, said
from cluster.providers.slurm.queue import FINAL
from cluster.providers.slurm.script import Request

MARKER = ".horovod-cluster"
# On the login host: the job's line in the queue, its attempt, its exit code, why it ended, and its new output.
LOOK = """\
cd "$1" || exit 3
squeue --noheader --states=all --jobs="$2" --format='FORMAT' 2> /dev/null | tail -n 1 | grep . || echo
attempt=$(cat attempt 2> /dev/null); echo "$attempt"
cat code 2> /dev/null || echo
cat why 2> /dev/null || echo
[ "$attempt" = "$3" ] || set -- "$1" "$2" "$3" 0
if [ -n "$attempt" ]; then tail -c "+$(($4 + 1))" "out.$attempt" 2> /dev/null; fi
true
""".replace("FORMAT", slurm_queue.FORMAT)
# A requeued job is for a moment in the state that ended its last attempt.
SURE_AFTER = 2
ERROR_LINES = 50
# A login host that restarts is back by then. The job goes on meanwhile.
MOST_SILENT = 600.0
Print = Callable[[str], None]


@dataclass(frozen=True)
class Seen:
    state: str
    reason: str
    expected: str
    attempt: str
    code: str
    why: str
    output: bytes


def seen(answer: bytes) -> Seen:
    lines = answer.split(b"\n", 4)
    state, attempt, code, why = (line.decode(errors="replace").strip() for line in lines[:4])
    job = slurm_queue.parse(state) or slurm_queue.Job("")
    return Seen(job.state, job.reason, job.expected, attempt, code, why, lines[4] if len(lines) > 4 else b"")


class Jobs:
    """The jobs of one environment, in a folder of the cluster's shared file system."""

    def __init__(self, section: Slurm, state_dir: Path, gpu_model: str) -> None:
        self.section, self.state_dir, self.gpu_model = section, state_dir, gpu_model
        self.login, self.ledger = Login(section), Ledger(state_dir / "jobs.jsonl")
        self.marker = state_dir / "slurm-marker"
        self.stop = threading.Event()
        # Shows a job that waits or ends; bench reads events.
        self.tell: Callable[[Allocation], None] = emit

    @property
    def worker(self) -> str:
        return f"{self.section.folder}/worker/{worker_files.digest()}"

    @property
    def python(self) -> str:
        """The Python that has torch and Horovod."""
        return f"{self.section.folder}/venv/bin/python" if self.section.build else self.section.python

    def folder(self, name: str) -> str:
        return f"{self.section.folder}/jobs/{name}"

    def claim(self) -> None:
        """Make the folder, with our marker; refuse one that is somebody else's."""
        path = f"{self.section.folder}/{MARKER}"
        words = ["sh", "-c", 'if [ -e "$1" ]; then cat "$2" || echo foreign; fi', "sh", self.section.folder, path]
        found = self.login.text(words).strip()
        if found and not (self.marker.exists() and found == files.text(self.marker)):
            raise UserError(
                f"cluster.slurm.folder: {self.section.folder} exists and is not this environment's; name a new folder"
            )
        if not found:
            identity = f"{time.time_ns():x}"
            self.marker.write_text(identity)
            make = 'umask 077 && mkdir -p "$1" && cat > "$2"'
            self.login.text(["sh", "-c", make, "sh", self.section.folder, path], identity.encode())

    def copy(self, name: str, files: Mapping[str, bytes]) -> None:
        """The worker, once per version, and the files of a job."""
        pack = 'rm -rf "$1" && mkdir -p "$1" "$2" && tar -x -C "$1" && { test -e "$2/$3" || mv "$1/worker" "$2/$3"; }'
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            with tarfile.open(fileobj=io.BytesIO(worker_files.archive())) as worker:
                for member in worker:
                    data = worker.extractfile(member)
                    member.name = f"worker/{member.name.partition('/')[2]}"
                    tar.addfile(member, data)
            for path, content in files.items():
                info = tarfile.TarInfo(path)
                info.size, info.mode = len(content), 0o600
                tar.addfile(info, io.BytesIO(content))
        words = ["sh", "-c", pack, "sh", self.folder(name), f"{self.section.folder}/worker", worker_files.digest()]
        self.login.text(words, buffer.getvalue())

    def test(self, request: Request) -> None:
        """Ask Slurm whether it would accept such a job, without submitting it. Raises UserError with its words."""
        words = ["sbatch", "--test-only", *script.options(self.section, request, self.gpu_model)]
        done = self.login.run([*words, "--wrap=true"])
        if done.returncode:
            raise UserError(f"cluster.slurm: Slurm refuses a job of {request.nodes} nodes: {said(done)}")

    def submit(self, request: Request, files: Mapping[str, bytes]) -> str:
        self.claim()
        text = script.render(self.section, request, self.gpu_model)
        self.copy(request.name, {**files, "job.sh": text.encode()})
        self.ledger.add("asked", request.name)
        done = self.login.run(["sbatch", "--parsable", f"{request.folder}/job.sh"])
        if done.returncode:
            self.ledger.add("refused", request.name)
            raise UserError(f"cluster.slurm: sbatch: {said(done)}")
        # A federation adds ;CLUSTER.
        identifier = done.stdout.decode().strip().partition(";")[0]
        self.ledger.add("submitted", request.name, id=identifier)
        return identifier

    def known(self, name: str) -> str:
        """The id of a job of this name that was submitted and whose end nobody has seen; "" if there is none."""
        if name not in self.ledger.open():
            return ""
        return self.ledger.open()[name] or self.find(name)

    def find(self, name: str) -> str:
        """The id of a job whose submission was not answered."""
        found = self.login.text(["squeue", "--noheader", "--me", f"--name={name}", "--format=%i"]).split()
        return found[-1] if found else ""

    def run(self, request: Request, files: Mapping[str, bytes], out: Print) -> None:
        """Return when the job has succeeded. A job of this name that still runs, or ended unseen, is collected."""
        identifier = self.known(request.name)
        if not identifier:
            identifier = self.submit(request, files)
        try:
            self.follow(request, identifier, out)
        except (InfraError, UserError):
            if self.stop.is_set():
                self.cancel(request.name, identifier)
            raise

    def follow(self, request: Request, job: str, out: Print) -> None:
        state, attempt, offset, ended, rest = "", "", 0, 0, b""
        folder = self.folder(request.name)
        answered = time.monotonic()
        while True:
            try:
                now = seen(self.login.run(["sh", "-c", LOOK, "sh", folder, job, attempt, str(offset)]).stdout)
            except InfraError as error:
                if time.monotonic() - answered > MOST_SILENT:
                    raise
                state = "UNKNOWN"
                self.tell(Allocation(job, state, str(error)))
                self.pause(job)
                continue
            answered = time.monotonic()
            if now.attempt != attempt:
                attempt, offset, rest = now.attempt, 0, b""
            offset += len(now.output)
            *lines, rest = (rest + now.output).split(b"\n")
            if now.state != "RUNNING" or state != now.state:
                self.tell(Allocation(job, now.state or "UNKNOWN", now.reason, now.expected))
            state = now.state
            for line in lines:
                out(line.decode(errors="replace"))
            # squeue forgets a job some minutes after its end.
            ended = ended + 1 if now.state in FINAL or not now.state else 0
            if ended >= SURE_AFTER or (now.code == "0" and ended):
                self.ledger.add("ended", request.name, status=now.state or "GONE")
                if now.code == "0":
                    return
                raise InfraError(f"Slurm job {job} {self.reason(request, now)}")
            self.pause(job)

    def pause(self, job: str) -> None:
        if self.stop.wait(self.section.poll_seconds):
            raise InfraError(f"stopped; Slurm job {job} is cancelled")

    def reason(self, request: Request, last: Seen) -> str:
        if last.why:
            return f"ended: {last.why}; run the same command again to go on"
        if last.state not in ("FAILED", "COMPLETED", ""):
            return f"ended: {last.state}; run the same command again to go on"
        words = f"tail -n {ERROR_LINES} err.{last.attempt or 0} job.log"
        show = ["sh", "-c", f'cd "$1" && {words} 2> /dev/null; true', "sh", self.folder(request.name)]
        lines = [line.strip() for line in self.login.text(show).splitlines() if line.strip()]
        marked = [line for line in lines if "error" in line.lower()]
        return f"failed: {(marked or lines or ['no output'])[-1][:300]}"

    def cancel(self, name: str, job: str) -> None:
        done = self.login.run(["scancel", job])
        if done.returncode and b"Invalid job id" not in done.stderr:
            raise InfraError(f"scancel {job}: {said(done)}; the job may still run")
        self.ledger.add("ended", name, status="CANCELLED")

    def destroy(self) -> None:
        """Cancel the jobs that we recorded, and remove the folder if it has our marker."""
        for name, identifier in self.ledger.open().items():
            if job := identifier or self.find(name):
                self.cancel(name, job)
        if not self.marker.exists():
            return
        remove = 'if [ "$(cat "$2" 2> /dev/null)" = "$3" ]; then rm -rf "$1"; fi'
        path = f"{self.section.folder}/{MARKER}"
        self.login.text(["sh", "-c", remove, "sh", self.section.folder, path, files.text(self.marker)])
        self.marker.unlink()
