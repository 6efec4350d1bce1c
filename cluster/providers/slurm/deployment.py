"""The command that Terraform runs for a Slurm cluster: `create` runs a job of two minutes that looks at the nodes and
adds up over all of them, `destroy` cancels our jobs and removes our folder.

`run FILE` is for bench: it runs one job and prints its output. When its standard input closes, it cancels the job,
unless its parent is gone: then the job goes on, and the next run of the same name collects it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from cluster.core import files
from cluster.core.errors import InfraError
from cluster.core.slurm_section import Slurm
from cluster.providers import testbed
from cluster.providers.slurm.jobs import Jobs
from cluster.providers.slurm.script import Request

PROBE_MINUTES = 2
MARK = "@probe "


class NodeFacts(TypedDict):
    """What bench/worker/slurm_probe.py finds on a node."""

    node: str
    python: str
    torch: str
    horovod: str
    cpu_level: int
    cores: int
    interface: str
    interfaces: dict[str, str]
    adapters: list[str]
    mpi: str
    nccl: str
    gpus: list[str]


class Probe(TypedDict):
    ranks: int
    right: bool
    nodes: list[NodeFacts]


def create(jobs: Jobs, name: str, nodes: int, gpus: int, subnet: str) -> None:
    command = [jobs.python, jobs.worker]
    request = Request(
        name=f"{name}-probe",
        folder=jobs.folder(f"{name}-probe"),
        nodes=nodes,
        slots=1,
        gpus=gpus,
        minutes=PROBE_MINUTES,
        command=[*command, "slurm_rank", *command, "slurm_probe", *([subnet] if subnet else [])],
    )
    lines: list[str] = []
    jobs.run(request, {}, lines.append)
    answers = [line.partition(MARK)[2] for line in lines if MARK in line]
    if not answers:
        raise InfraError(f"Slurm: the probe job ended without a result; its output is in {request.folder}")
    found = files.answer(answers[-1], "the probe job", Probe)
    (jobs.state_dir / "probe.json").write_text(json.dumps(found, indent=1) + "\n")
    if not found["right"] or found["ranks"] != nodes:
        raise InfraError(f"Slurm: a sum over {nodes} nodes is wrong or incomplete ({found['ranks']} ranks)")
    short = [one["node"] for one in found["nodes"] if len(one["gpus"]) < gpus]
    if short:
        raise InfraError(f"Slurm: torch sees fewer than {gpus} GPUs on {short[0]}; correct cluster.gpus_per_node")
    if alone := [one["node"] for one in found["nodes"] if not one["interface"]]:
        fix = "give the fabric its addresses in cluster.slurm.subnets"
        raise InfraError(f"Slurm: no interface for training found on {alone[0]}; {fix}")


def end_with_bench(jobs: Jobs, parent: int) -> None:
    """Our standard input ends when bench stops the launch, or when bench is gone."""
    sys.stdin.buffer.read()
    # A process that is being killed closes its files first.
    time.sleep(0.5)
    if os.getppid() != parent:
        os._exit(0)
    jobs.stop.set()


def run_for_bench(jobs: Jobs, value: dict[str, Any]) -> None:
    threading.Thread(target=end_with_bench, args=(jobs, os.getppid()), daemon=True).start()
    request = Request(**value["request"])
    jobs.run(request, {"spec.json": Path(value["spec"]).read_bytes()}, partial(print, flush=True))


def main() -> int:
    action = sys.argv[1]
    value = json.loads(Path(sys.argv[2]).read_text() if action == "run" else os.environ["INPUT"])
    section = Slurm.model_validate(value["settings"])
    jobs = Jobs(section, Path(value["state_dir"]), value["gpu_model"])
    if action == "run":
        # Ctrl-C reaches us too. Bench decides.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = testbed.run_tool(partial(run_for_bench, jobs, value))
        sys.stdout.flush()
        # A thread is blocked in a read. A normal exit would wait for its lock and abort.
        os._exit(code)
    signal.signal(signal.SIGTERM, lambda *_: jobs.stop.set())
    if action == "destroy":
        return testbed.run_tool(jobs.destroy, jobs.state_dir)
    given = (value["name"], value["nodes"], value["gpus"], value["subnet"])
    return testbed.run_tool(partial(create, jobs, *given), jobs.state_dir)


if __name__ == "__main__":
    sys.exit(main())
