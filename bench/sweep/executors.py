"""Where a launch runs: on nodes we log in to, or as jobs on GPULab. A command prints the worker's lines."""

from __future__ import annotations

import json
import sys
from typing import Protocol

from bench.plan import unfold
from bench.sweep import launch, nodes
from cluster.core import config, worker_files
from cluster.core.contract import Contract
from cluster.core.errors import UserError
from cluster.core.state import State
from cluster.providers.gpulab.provider import OnGpulab

ENGINES = ("horovod-gloo",)


class Executor(Protocol):
    contract: Contract
    grace: float  # seconds that ending everything may take
    suffix: str  # what a run's name gets, where results of several ways to run must not mix

    def silent(self, names: list[str]) -> list[str]: ...
    def install(self, names: list[str]) -> str: ...
    def restore(self, names: list[str]) -> None: ...
    def argv(self, job: launch.Launch, worker: str) -> list[str]: ...


class Nodes:
    """Over SSH: the head starts the launcher, a supervisor there ends it when we are gone."""

    grace = 15.0
    suffix = ""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def silent(self, names: list[str]) -> list[str]:
        return nodes.silent(self.contract, names)

    def install(self, names: list[str]) -> str:
        return nodes.install_worker(self.contract, names)

    def restore(self, names: list[str]) -> None:
        nodes.restore_rates(self.contract, names)

    def argv(self, job: launch.Launch, worker: str) -> list[str]:
        inner = [*("python3", f"{worker}/supervise.py", job.run, ",".join(job.hosts)), *launch.argv(job)]
        return nodes.as_training_account(self.contract, job.hosts[0], inner)


class Jobs:
    """On GPULab: each launch is a set of jobs. The worker is in their image; its version must be the one we have."""

    grace = 300.0

    def __init__(self, contract: Contract, env: str) -> None:
        self.state, self.cluster = State(env), config.load(env)
        self.provider = OnGpulab(self.state, self.cluster)
        self.contract = self.seen(contract)
        self.suffix = "-1xN" if unfold.one_job(contract) else "-Nx1"

    def seen(self, contract: Contract) -> Contract:
        """The contract with the interface that the probe found between jobs: on it their traffic is counted."""
        if not self.provider.deployment.probe_file.exists():
            return contract
        interface = json.loads(self.provider.deployment.probe_file.read_text())["interface"]
        fabrics = {name: one.model_copy(update={"interface": interface}) for name, one in contract.fabrics.items()}
        return contract.model_copy(update={"fabrics": fabrics})

    def silent(self, names: list[str]) -> list[str]:
        return []

    def install(self, names: list[str]) -> str:
        return f"/opt/bench-worker/{worker_files.archive()[0]}/bench/worker"

    def restore(self, names: list[str]) -> None: ...

    def argv(self, job: launch.Launch, worker: str) -> list[str]:
        if job.engine not in ENGINES:
            raise UserError(f"plan.engines: {job.engine} needs to log in to nodes; on GPULab use {', '.join(ENGINES)}")
        gpus = job.slots if job.cuda else 0
        # Each job finds its own interface.
        kept = {name: value for name, value in job.environment.items() if not name.endswith(("IFACE", "IFNAME"))}
        request = {
            "settings": self.provider.settings.model_dump(),
            "state_dir": str(self.state.dir),
            "gpu_model": self.cluster.gpu_model,
            "name": f"{self.cluster.name}-{job.run}",
            "shape": {"jobs": len(job.hosts), "slots": job.slots, "gpus": gpus},
            "command": [launch.PYTHON, f"{worker}/job.py", launch.PYTHON, *job.worker_words],
            "environment": kept,
        }
        file = self.state.dir / "requests" / f"{job.run}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(request))
        return [sys.executable, "-m", "cluster.providers.gpulab.deployment", "run", str(file)]


def make(contract: Contract, env: str) -> Nodes | Jobs:
    return Jobs(contract, env) if contract.provider == "gpulab" else Nodes(contract)


def size(contract: Contract, cluster: config.Cluster) -> int:
    """How many nodes a plan may ask for; one job counts its GPUs."""
    if unfold.one_job(contract):
        return contract.nodes[contract.head].gpus or cluster.nodes
    return len(contract.nodes)
