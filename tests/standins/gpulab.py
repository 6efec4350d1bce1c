"""A stand-in for GPULab: an HTTPS server with the v4 calls that gpulab-cli makes. Jobs run on this machine.

Script says which jobs fail and how. A running job is a process: `run` gets the job and returns a Popen. If `run` is
None, jobs run for the script's run_seconds and have the script's log.
"""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

USER = "urn:publicid:IDN+ilabt.imec.be+user+tester"
CA = """[req]
distinguished_name=dn
prompt=no
[dn]
CN=tester
[ca]
default_ca=here
[here]
database={folder}/index
new_certs_dir={folder}
rand_serial=yes
default_md=sha256
policy=any
[any]
commonName=supplied
[ext]
subjectAltName=URI:{user},email:tester@example.org,IP:127.0.0.1
"""


def make_pem(path: Path, days: int = 1, password: str | None = None) -> Path:
    """A login certificate like those of the account portal (key, certificate, the user's URN), but self-signed."""
    begin, end = (datetime.now(UTC) + timedelta(days=n) for n in (-30, days))
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        (folder / "ca.cnf").write_text(CA.format(folder=folder, user=USER))
        (folder / "index").touch()
        for argv in (
            "genrsa -out key 2048",
            "req -new -key key -config ca.cnf -out request",
            # `ca` accepts any dates; an expired certificate needs that.
            "ca -batch -selfsign -config ca.cnf -extensions ext -keyfile key -notext -in request -out certificate "
            f"-startdate {begin:%y%m%d%H%M%SZ} -enddate {end:%y%m%d%H%M%SZ}",
        ):
            subprocess.run(["openssl", *argv.split()], cwd=folder, check=True, capture_output=True)
        if password:
            lock = ["openssl", "pkey", "-aes256", "-passout", f"pass:{password}", "-in", "key", "-out", "locked"]
            subprocess.run(lock, cwd=folder, check=True, capture_output=True)
        key = folder / ("locked" if password else "key")
        path.write_text((folder / "certificate").read_text() + key.read_text())
    path.chmod(0o600)
    return path


@dataclass
class Script:
    """Failures to simulate. Numbers are job numbers in the order of submission."""

    fail_in_queue: int | None = None
    halt: int | None = None
    never_start: int | None = None
    crash: int | None = None
    submit_status: int = 200
    submit_error_from: int = 0
    broken_polls: int = 0  # number of polls to answer with 500
    run_seconds: float = 0.5
    log: str = "hello from the job\n"


@dataclass
class SimulatedJob:
    number: int
    id: str
    definition: dict[str, Any]
    status: str
    log: str = ""
    process: subprocess.Popen[str] | None = None
    started: float | None = None


class GpulabServer:
    def __init__(
        self,
        pem: Path,
        script: Script,
        run: Callable[[SimulatedJob], subprocess.Popen[str]] | None = None,
        password: str | None = None,
    ) -> None:
        self.script, self.run = script, run
        self.jobs: dict[str, SimulatedJob] = {}
        self.calls: list[str] = []
        self.lock = threading.Lock()
        handler = type("Bound", (Handler,), {"gpulab": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem, password=password)
        # Like the real server, accept only clients with the login certificate.
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(pem)
        # The TLS handshake runs in each connection's own thread, so that a slow client does not block the others.
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.environment = {
            "GPULAB_API_BASE": f"https://127.0.0.1:{self.server.server_port}/api/",
            "GPULAB_SERVER_CERT": str(pem),
            # This variable overrides the CLI's own setting, and some sites set it.
            "REQUESTS_CA_BUNDLE": str(pem),
        }

    def __enter__(self) -> GpulabServer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs.values():
            self.end(job, "CANCELLED")
        self.server.shutdown()
        self.server.server_close()

    @property
    def alive(self) -> list[SimulatedJob]:
        over = ("FINISHED", "FAILED", "CANCELLED", "HALTED", "DELETED")
        return [job for job in self.jobs.values() if job.status not in over]

    def submit(self, definition: dict[str, Any], hold: bool) -> SimulatedJob:
        with self.lock:
            job = SimulatedJob(len(self.jobs), str(uuid.uuid4()), definition, "ONHOLD" if hold else "QUEUED")
            self.jobs[job.id] = job
        return job

    def release(self, job: SimulatedJob) -> None:
        job.status = "QUEUED"
        script = self.script
        if script.never_start == job.number:
            return
        if script.fail_in_queue == job.number:
            job.status = "FAILED"
            job.log = "Error: no such image\n"
            return
        job.started = time.monotonic()
        job.status = "RUNNING"
        if self.run:
            job.process = self.run(job)
            threading.Thread(target=self.collect_log, args=(job,), daemon=True).start()
        else:
            job.log = script.log

    def collect_log(self, job: SimulatedJob) -> None:
        for line in job.process.stdout or ():
            job.log += line
        code = job.process.wait()
        if job.status == "RUNNING":
            job.status = "FAILED" if code else "FINISHED"

    def advance(self, job: SimulatedJob) -> None:
        """Update the status of a job without a process."""
        if job.status == "RUNNING" and job.process is None:
            if self.script.halt == job.number:
                job.status = "MUSTHALT"
            elif time.monotonic() - (job.started or 0) > self.script.run_seconds:
                crashed = self.script.crash == job.number
                job.status = "FAILED" if crashed else "FINISHED"
                job.log += "Traceback ...\nValueError: boom\n" if crashed else ""

    def end(self, job: SimulatedJob, status: str) -> None:
        if job in self.alive:
            job.status = status
        if job.process and job.process.poll() is None:
            job.process.terminate()
            try:
                job.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                job.process.kill()


class Handler(BaseHTTPRequestHandler):
    gpulab: GpulabServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def answer(self, code: int, body: str, kind: str = "text/plain") -> None:
        data = body.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, ssl.SSLError):
            self.close_connection = True

    def job(self) -> SimulatedJob | None:
        match = re.search(r"/jobs/([0-9a-f-]{36})", self.path)
        return self.gpulab.jobs.get(match[1]) if match else None

    def body(self) -> str:
        return self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()

    def do_POST(self) -> None:
        content, script = self.body(), self.gpulab.script
        self.gpulab.calls.append(f"POST {self.path}")
        if script.submit_status != 200 and len(self.gpulab.jobs) >= script.submit_error_from:
            self.answer(script.submit_status, "refused by the script")
            return
        self.answer(200, self.gpulab.submit(json.loads(content), "hold=true" in self.path).id)

    def do_PUT(self) -> None:
        status, job = self.body(), self.job()
        self.gpulab.calls.append(f"PUT {status}")
        if job is None:
            self.answer(404, "no such job")
            return
        if status == "QUEUED":
            self.gpulab.release(job)
        else:
            self.gpulab.end(job, status)
        self.answer(200, "")

    def do_GET(self) -> None:
        job = self.job()
        if self.path.split("?")[0].endswith("/version"):
            self.answer(200, json.dumps({"latest_client_version": "3.11.12"}), "application/json")
        elif self.path.split("?")[0].endswith("/jobs"):
            items = [self.describe(job) for job in self.gpulab.jobs.values()]
            self.answer(200, json.dumps({"items": items}), "application/json")
        elif job is None:
            self.answer(404, "no such job")
        elif self.path.endswith("/log"):
            self.answer(200 if job.log else 204, job.log)
        elif self.gpulab.script.broken_polls:
            self.gpulab.script.broken_polls -= 1
            self.answer(500, "the script broke it")
        else:
            self.gpulab.advance(job)
            self.answer(200, json.dumps(self.describe(job)), "application/json")

    def describe(self, job: SimulatedJob) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        owner = {"projectUrn": job.definition["owner"]["projectUrn"], "userUrn": USER}
        request = json.loads(json.dumps(job.definition["request"]))
        request["scheduling"].setdefault("minDuration", "5 minutes")
        return {
            "uuid": job.id,
            "name": job.definition["name"],
            "request": request,
            "owner": {**owner, "userEmail": "tester@example.org"},
            "state": {
                "status": job.status,
                "scheduling": {},
                "eventTimes": {"created": now, "statusUpdated": now, **({"RUNNING": now} if job.started else {})},
            },
        }
