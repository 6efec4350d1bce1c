"""Executors run a launch: on nodes over SSH, through Slurm, or as jobs on GPULab. Its command prints the output.

The contract's `executor` names the one of a cluster.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import zlib
from dataclasses import asdict
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
from cluster.providers.gpulab.deployment import Probe
from cluster.providers.gpulab.provider import Gpulab
from cluster.providers.slurm.provider import Slurm
from cluster.providers.slurm.script import Request

GPULAB_ENGINES = ("horovod-gloo",)
SLURM_ENGINES = ("horovod-gloo", "ddp", "ps")
# Linux limits an environment variable to 131,072 bytes.
MAX_VARIABLE_BYTES = 100_000


class Executor(Protocol):
    contract: Contract
    grace: float  # timeout in seconds for ending a launch
    has_nodes: bool  # whether one can log in to nodes, and read what is on them
    has_queue: bool  # whether launches wait for nodes that others may use, and cost their time
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
    has_queue = False
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


class SlurmExecutor(SshExecutor):
    """Starts each launch in an allocation of Slurm. The worker and the rate still come over SSH."""

    has_queue = True

    def argv(self, launch: Launch) -> list[str]:
        words = ["python3", worker_files.folder(), "slurm_launch", *launchers.salloc(launch)]
        return ssh.as_training_account(self.contract, self.contract.head, words)


class GpulabExecutor:
    """Runs each launch as a set of jobs. Their image contains the worker, which must have our version."""

    grace = 300.0
    has_nodes = False
    has_queue = True

    def __init__(self, contract: Contract, env: str) -> None:
        self.state, self.cluster = State(env), State(env).cluster()
        self.provider = Gpulab(self.state, self.cluster)
        self.contract = self.probed(contract)
        self.suffix = "-1xN" if unfold.one_job(contract) else "-Nx1"
        self.spec = b""

    def probed(self, contract: Contract) -> Contract:
        probe = self.provider.deployment.probe_file
        return with_interface(contract, files.record(probe, Probe)["interface"]) if probe.exists() else contract

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


class SlurmJobExecutor:
    """Runs each launch as a job on somebody else's Slurm cluster, where nobody logs in to nodes.

    A job goes on when this process is killed. The next sweep of the same run finds it and reads its output.
    """

    grace = 60.0
    has_nodes = False
    has_queue = True
    suffix = ""

    def __init__(self, contract: Contract, env: str) -> None:
        self.state, self.cluster = State(env), State(env).cluster()
        self.provider = Slurm(self.state, self.cluster)
        found = [node["interface"] for node in self.provider.probed()]
        self.contract = with_interface(contract, found[0] if found else "")
        self.spec = self.state.dir / "requests" / "spec.json"

    def offline(self, names: list[str]) -> list[str]:
        return []

    def install(self, names: list[str], spec: Spec) -> SpecFile:
        content = spec.encode()
        self.spec.parent.mkdir(exist_ok=True)
        self.spec.write_bytes(content)
        # In the job's own folder, where it starts.
        return SpecFile("spec.json", hashlib.sha256(content).hexdigest())

    def restore(self, names: list[str]) -> None: ...

    def foreign(self, launch: Launch, senders: bool = False) -> list[str]:
        """A job has its nodes to itself."""
        return []

    def argv(self, launch: Launch) -> list[str]:
        if launch.engine not in SLURM_ENGINES or launch.torchrun or launch.container:
            known = ", ".join(SLURM_ENGINES)
            raise UserError(
                f"plan.engines: jobs of ENV={self.state.env} start without mpirun and containers; use {known}"
            )
        jobs = self.provider.jobs
        start = [jobs.python, jobs.worker]
        # What is measured under which settings: a job of an interrupted sweep that did the same is collected.
        same = [launch.name, launch.engine, len(launch.hosts), launch.slots, launch.program, launch.environment]
        name = f"{self.cluster.name}-{hashlib.sha256(json.dumps(same).encode()).hexdigest()[:12]}"
        request = Request(
            name=name,
            folder=jobs.folder(name),
            nodes=len(launch.hosts),
            slots=launch.slots,
            gpus=launch.slots if launch.cuda else 0,
            command=[*start, "slurm_rank", *start, *launch.worker_words[1:]],
            environment=launch.environment,
        )
        value = {
            "settings": self.provider.section.model_dump(),
            "state_dir": str(self.state.dir),
            "gpu_model": self.cluster.gpu_model,
            "request": asdict(request),
            "spec": str(self.spec),
        }
        file = self.spec.with_name(f"{launch.run}.json")
        file.write_text(json.dumps(value))
        return [sys.executable, "-m", "cluster.providers.slurm.deployment", "run", str(file)]


def with_interface(contract: Contract, interface: str) -> Contract:
    """The contract with the interface that a probe found; traffic between jobs is counted on it."""
    fabrics = {name: fab.model_copy(update={"interface": interface}) for name, fab in contract.fabrics.items()}
    return contract.model_copy(update={"fabrics": fabrics})


def on_nodes(contract: Contract) -> SshExecutor:
    """For measurements that log in to nodes."""
    return SlurmExecutor(contract) if contract.executor == "slurm" else SshExecutor(contract)


def make(contract: Contract, env: str) -> Executor:
    if contract.executor == "gpulab":
        return GpulabExecutor(contract, env)
    if contract.executor == "slurm" and contract.ssh is None:
        return SlurmJobExecutor(contract, env)
    return on_nodes(contract)


def size(contract: Contract, cluster: Cluster) -> int:
    """Maximum of plan.nodes: nodes, or GPUs in mode 1xN."""
    if unfold.one_job(contract):
        return contract.nodes[contract.head].gpus or cluster.nodes
    return len(contract.compute)
