"""The command that Terraform runs for GPULab: `create` validates and probes jobs, `destroy` cancels them.

`run FILE` is for bench: it runs one set of jobs and prints the log of the first. When its standard input closes, it
cancels all of them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from cluster.core import files, sections, worker_files
from cluster.core.config import layout
from cluster.core.errors import InfraError
from cluster.providers import testbed
from cluster.providers.gpulab import cli as gpulab_cli
from cluster.providers.gpulab import job_request
from cluster.providers.gpulab.cli import Cli
from cluster.providers.gpulab.gang import Gang, PrintLine, cancel_open_jobs
from cluster.providers.gpulab.job_request import Definition, Shape
from cluster.providers.ledger import Ledger

PYTHON = f"{layout()['venv']}/bin/python"


class Probe(TypedDict):
    """What bench/worker/gpulab_job.py prints."""

    jobs: int
    unreachable: list[str]
    interface: str


class Deployment:
    def __init__(self, section: sections.Gpulab, folder: Path, gpu_model: str) -> None:
        self.section, self.folder, self.gpu_model = section, folder, gpu_model
        self.ledger = Ledger(folder / "jobs.jsonl")
        self.cli = Cli(section, folder)
        self.probe_file = folder / "probe.json"
        self.stop = threading.Event()

    def run(self, name: str, shape: Shape, command: list[str], environment: dict[str, str], out: PrintLine) -> None:
        self.cli.check()
        definitions = self.definitions(f"{name}-{int(time.time() * 1000):x}", shape, command, environment)
        Gang(self.cli, self.ledger, out, self.folder / "joblogs", self.stop).run(definitions)

    def definitions(self, name: str, shape: Shape, command: list[str], environment: dict[str, str]) -> list[Definition]:
        """The validated jobs of one set."""
        now = datetime.now(UTC)
        found = job_request.definitions(self.section, name, shape, command, environment, self.gpu_model, now)
        gpulab_cli.validate(found, self.cli.log_file)
        return found

    def probe(self, name: str, job_command: list[str]) -> None:
        """Run two jobs without a GPU that test whether jobs can reach each other; keep the result."""
        lines: list[str] = []
        self.run(f"{name}-probe", Shape(2, 1, 0), [*job_command, "probe"], {}, lines.append)
        answers = [line.partition("@probe ")[2] for line in lines if "@probe " in line]
        if not answers:
            raise InfraError(f"the probe jobs ended without a result; their logs are in {self.folder / 'joblogs'}")
        answer = files.answer(answers[-1], "the probe jobs", Probe)
        self.probe_file.write_text(json.dumps(answer) + "\n")
        if answer["unreachable"]:
            fix = "use MODE=1xN, or set cluster.gpulab.cluster_id to a cluster whose jobs share a network"
            silent = ", ".join(answer["unreachable"])
            raise InfraError(f"GPULab jobs do not reach each other: no answer from {silent}; {fix}")

    def create(self, name: str, size: int, gpus: bool, digest: str) -> None:
        shape = job_request.choose_shape(self.section.mode, size, gpus)
        command = [PYTHON, f"{worker_files.ON_NODE}/{digest}", "gpulab_job"]
        self.definitions(name, shape, command, {})
        if shape.jobs > 1:
            self.probe(name, command)

    def destroy(self) -> None:
        cancel_open_jobs(self.cli, self.ledger)


def stop_at_end_of_input(stop: threading.Event) -> None:
    """Our standard input ends when the process that started us is gone."""
    sys.stdin.buffer.read()
    stop.set()


def run_for_bench(deployment: Deployment, value: dict[str, Any]) -> None:
    threading.Thread(target=stop_at_end_of_input, args=(deployment.stop,), daemon=True).start()
    shape, out = Shape(**value["shape"]), partial(print, flush=True)
    deployment.run(value["name"], shape, value["command"], value["environment"], out)


def main() -> int:
    action = sys.argv[1]
    value = json.loads(Path(sys.argv[2]).read_text() if action == "run" else os.environ["INPUT"])
    section = sections.Gpulab.model_validate(value["settings"])
    deployment = Deployment(section, Path(value["state_dir"]), value["gpu_model"])
    signal.signal(signal.SIGTERM, lambda *_: deployment.stop.set())
    if action == "run":
        return testbed.run_tool(partial(run_for_bench, deployment, value))
    if action == "destroy":
        return testbed.run_tool(deployment.destroy, deployment.folder)
    create = partial(deployment.create, value["name"], value["size"], value["gpus"] > 0, value["worker"])
    return testbed.run_tool(create, deployment.folder)


if __name__ == "__main__":
    sys.exit(main())
