"""Executors run a launch: on nodes over SSH, or as jobs on GPULab. Its command prints the worker's output.

The contract's `executor` names the one of a cluster.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import zlib
from typing import Protocol

from bench.plan import unfold
from bench.sweep import foreign
from bench.sweep import launch as launchers
from bench.sweep.launch import Launch, SpecFile
from bench.worker.protocol import Spec
from cluster.core import files, ssh, worker_files
from cluster.core.config import Cluster
from cluster.core.contract import Contract
from cluster.core.errors import UserError
from cluster.core.state import State
from cluster.providers.gpulab.provider import Gpulab

GPULAB_ENGINES = ("horovod-gloo",)
# Linux limits an environment variable to 131,072 bytes.
MAX_VARIABLE_BYTES = 100_000


class Executor(Protocol):
    contract: Contract
    grace: float  # timeout in seconds for ending a launch
    has_nodes: bool  # whether one can log in to nodes, and read what is on them
    suffix: str  # of the run's name, to keep the results of different modes apart

    def offline(self, names: list[str]) -> list[str]: ...
    def install(self, names: list[str], spec: Spec) -> SpecFile: ...
    def restore(self, names: list[str]) -> None: ...
    def argv(self, launch: Launch) -> list[str]: ...
    def foreign(self, launch: Launch, senders: bool = False) -> list[str]: ...


class SshExecutor:
    """Starts the launcher on the head, under a supervisor that ends it when this process ends."""

    grace = 15.0
    has_nodes = True
    suffix = ""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.specs: set[str] = set()

    def offline(self, names: list[str]) -> list[str]:
        return ssh.offline(self.contract, names)

    def install(self, names: list[str], spec: Spec) -> SpecFile:
        """Copy the worker and the spec to all nodes in parallel. Nobody else may use them."""
        foreign.refuse_run_on_head(self.contract)
        content = spec.encode()
        digest = hashlib.sha256(content).hexdigest()
        name = f"specs/{digest[:16]}.json"
        self.specs.add(path := f"{worker_files.ON_NODE}/{name}")
        worker_files.install(self.contract, names, {name: content})
        return SpecFile(path, digest)

    def restore(self, names: list[str]) -> None:
        """Restore the rate of the fabric. On a node that is offline, a boot or the next deploy restores it."""
        command = f"sudo /usr/local/sbin/fabric-rate reset; sudo rm -f {' '.join(sorted(self.specs))}"
        ssh.run_on_all(self.contract, names, command, timeout=10)

    def argv(self, launch: Launch) -> list[str]:
        # The head alone can log in to the other nodes. It need not run ranks itself.
        nodes = dict.fromkeys([self.contract.head, *launch.hosts])
        inner = ["python3", worker_files.folder(), "supervise", launch.run, ",".join(nodes)]
        return ssh.as_training_account(self.contract, self.contract.head, [*inner, *launchers.argv(launch)])

    def foreign(self, launch: Launch, senders: bool = False) -> list[str]:
        """Which other work runs on the launch's nodes, or only which uses the fabric; one text per node."""
        return foreign.find(self.contract, launch.hosts, launch.run, senders)


class GpulabExecutor:
    """Runs each launch as a set of jobs. Their image contains the worker, which must have our version."""

    grace = 300.0
    has_nodes = False

    def __init__(self, contract: Contract, env: str) -> None:
        self.state, self.cluster = State(env), State(env).cluster()
        self.provider = Gpulab(self.state, self.cluster)
        self.contract = self.with_interface(contract)
        self.suffix = "-1xN" if unfold.one_job(contract) else "-Nx1"
        self.spec = b""

    def with_interface(self, contract: Contract) -> Contract:
        """The contract with the interface that the probe found; traffic between jobs is counted on it."""
        if not self.provider.deployment.probe_file.exists():
            return contract
        interface = files.mapping(self.provider.deployment.probe_file)["interface"]
        fabrics = {name: fab.model_copy(update={"interface": interface}) for name, fab in contract.fabrics.items()}
        return contract.model_copy(update={"fabrics": fabrics})

    def offline(self, names: list[str]) -> list[str]:
        return []

    def install(self, names: list[str], spec: Spec) -> SpecFile:
        self.spec = spec.encode()
        return SpecFile("/tmp/bench-spec.json", hashlib.sha256(self.spec).hexdigest())  # noqa: S108 (in the job)

    def restore(self, names: list[str]) -> None: ...

    def foreign(self, launch: Launch, senders: bool = False) -> list[str]:
        """A job has its machine, or its share of one, to itself."""
        return []

    def spec_variables(self, path: str) -> dict[str, str]:
        """The spec in parts for gpulab_job.py: variables are the only way to pass a file to a job."""
        text = base64.b64encode(zlib.compress(self.spec)).decode()
        parts = [text[at : at + MAX_VARIABLE_BYTES] for at in range(0, len(text), MAX_VARIABLE_BYTES)]
        variables = {f"SPEC_{number}": part for number, part in enumerate(parts)}
        return {"SPEC_FILE": path, "SPEC_PARTS": str(len(parts)), **variables}

    def argv(self, launch: Launch) -> list[str]:
        if launch.engine not in GPULAB_ENGINES:
            known = ", ".join(GPULAB_ENGINES)
            raise UserError(f"plan.engines: {launch.engine} needs SSH between nodes, which GPULab lacks; use {known}")
        # Each job finds its own interface.
        environment = {k: v for k, v in launch.environment.items() if not k.endswith(("IFACE", "IFNAME", "FABRIC"))}
        request = {
            "settings": self.provider.section.model_dump(),
            "state_dir": str(self.state.dir),
            "gpu_model": self.cluster.gpu_model,
            "name": f"{self.cluster.name}-{launch.run}",
            "shape": {"jobs": len(launch.hosts), "slots": launch.slots, "gpus": launch.slots if launch.cuda else 0},
            "command": [launchers.PYTHON, worker_files.folder(), "gpulab_job", launchers.PYTHON, *launch.worker_words],
            "environment": {**environment, **self.spec_variables(launch.spec.path)},
        }
        file = self.state.dir / "requests" / f"{launch.run}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(request))
        return [sys.executable, "-m", "cluster.providers.gpulab.deployment", "run", str(file)]


def make(contract: Contract, env: str) -> SshExecutor | GpulabExecutor:
    return GpulabExecutor(contract, env) if contract.executor == "gpulab" else SshExecutor(contract)


def size(contract: Contract, cluster: Cluster) -> int:
    """Maximum of plan.nodes: nodes, or GPUs in mode 1xN."""
    if unfold.one_job(contract):
        return contract.nodes[contract.head].gpus or cluster.nodes
    return len(contract.compute)
