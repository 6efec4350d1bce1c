"""What Terraform calls for GPULab, as `python -m ... create|destroy`: try out jobs, cancel jobs.

Also what the bench starts for a measurement (`run FILE`): one set of jobs, its first job's log on standard output; when
standard input closes, all of them are cancelled.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cluster.core import errors, worker_files
from cluster.core.errors import InfraError, UserError
from cluster.core.sections import Gpulab
from cluster.providers.gpulab import cli as gpulab_cli
from cluster.providers.gpulab import job_request
from cluster.providers.gpulab.cli import Cli
from cluster.providers.gpulab.gang import Gang, end_all
from cluster.providers.gpulab.ledger import Ledger

PYTHON = "/opt/horovod/bin/python"


class Deployment:
    def __init__(self, settings: Gpulab, folder: Path, gpu_model: str = "none") -> None:
        self.settings, self.folder, self.gpu_model = settings, folder, gpu_model
        self.ledger = Ledger(folder / "jobs.jsonl")
        self.cli = Cli(settings, folder)
        self.probe_file = folder / "probe.json"
        self.stop = threading.Event()

    def run(
        self, name: str, shape: job_request.Shape, command: list[str], environment: dict[str, str], out: Any
    ) -> None:
        run = f"{name}-{int(time.time() * 1000):x}"
        self.cli.check()
        now = datetime.now(UTC)
        found = job_request.definitions(self.settings, run, shape, command, environment, self.gpu_model, now)
        gpulab_cli.validate(found, self.cli.log_file)
        Gang(self.cli, self.ledger, out, self.folder / "joblogs", self.stop).run(found)

    def probe(self, name: str, digest: str) -> None:
        """Two jobs without a GPU find out whether jobs reach each other; the answer is kept."""
        lines: list[str] = []
        command = [PYTHON, f"{worker_files.ON_NODE}/{digest}", "gpulab_job", "probe"]
        self.run(f"{name}-probe", job_request.Shape(2, 1, 0), command, {}, lines.append)
        answers = [line.partition("@probe ")[2] for line in lines if "@probe " in line]
        if not answers:
            raise InfraError(f"the probe jobs ended without an answer; their logs are in {self.folder / 'joblogs'}")
        answer = json.loads(answers[-1])
        self.probe_file.write_text(json.dumps(answer) + "\n")
        if answer["unreachable"]:
            raise InfraError(
                f"GPULab jobs do not reach each other: {', '.join(answer['unreachable'])} did not answer. Nx1 cannot "
                "train here; use MODE=1xN, or set cluster.gpulab.cluster_id to a cluster whose jobs share a network"
            )

    def create(self, name: str, size: int, gpus: bool, digest: str) -> None:
        shape = job_request.shape(self.settings.mode, size, gpus)
        found = job_request.definitions(
            self.settings,
            name,
            shape,
            [PYTHON, f"{worker_files.ON_NODE}/{digest}", "gpulab_job"],
            {},
            self.gpu_model,
            datetime.now(UTC),
        )
        gpulab_cli.validate(found, self.cli.log_file)
        if shape.jobs > 1:
            self.probe(name, digest)

    def destroy(self) -> None:
        if self.ledger.open():
            end_all(self.cli, self.ledger)


def watch(stop: threading.Event) -> None:
    """Whoever started us is gone when our standard input ends."""
    while sys.stdin.buffer.read(1):
        pass
    stop.set()


def main() -> int:
    action = sys.argv[1]
    value = json.loads(Path(sys.argv[2]).read_text() if action == "run" else os.environ["INPUT"])
    settings = Gpulab.model_validate(value["settings"])
    deployment = Deployment(settings, Path(value["state_dir"]), value["gpu_model"])
    signal.signal(signal.SIGTERM, lambda *_: deployment.stop.set())
    try:
        if action == "create":
            deployment.create(value["name"], value["size"], value["gpus"] > 0, value["worker"])
        elif action == "run":
            threading.Thread(target=watch, args=(deployment.stop,), daemon=True).start()
            shape = job_request.Shape(**value["shape"])
            out = lambda line: print(line, flush=True)  # noqa: E731
            deployment.run(value["name"], shape, value["command"], value["environment"], out)
        else:
            deployment.destroy()
    except (InfraError, UserError) as error:
        if action != "run":
            errors.pass_on(deployment.folder, error)
        print(f"fatal: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
