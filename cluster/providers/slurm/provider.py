"""An account on a Slurm cluster instead of nodes: nothing to log in to but its login host, nothing for Ansible."""

from __future__ import annotations

import sys

from cluster.core import files, slurm_section, worker_files
from cluster.core.config import Cluster
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers.base import Check, NodeState, Provider
from cluster.providers.slurm import build, queue
from cluster.providers.slurm.deployment import NodeFacts, Probe
from cluster.providers.slurm.jobs import Jobs
from cluster.providers.slurm.script import Request


class Slurm(Provider):
    has_nodes = False
    section: slurm_section.Slurm

    def __init__(self, state: State, cluster: Cluster) -> None:
        super().__init__(state, cluster)
        self.jobs = Jobs(self.section, state.dir, cluster.gpu_model)

    def ensure_image(self, progress: Progress) -> str:
        return self.jobs.python

    def prepare(self, progress: Progress) -> None:
        """Compare cluster.yml with what the cluster has and accepts, before anything is made there."""
        version = self.jobs.login.text(["sinfo", "--version"]).strip()
        progress(f"{self.section.login}: {version}")
        gpus = self.cluster.gpus_per_node
        self.jobs.test(Request("test", "/tmp", self.cluster.nodes, max(gpus, 1), (), gpus))  # noqa: S108 (not used)
        # A cluster without enforcement accepts what can never run.
        self.check_partition()
        self.check_account()
        if self.section.build:
            build.build(self.jobs, self.state, self.cluster, progress)
        progress("two minutes of a job will look at the nodes and add up over all of them")

    def check_partition(self) -> None:
        """Slurm accepts a job that is too large for its partition, and leaves it pending, unless told otherwise."""
        found = queue.partitions(self.jobs.login.text(["scontrol", "--oneliner", "show", "partition"]))
        name = self.section.partition or next((one.name for one in found.values() if one.default), "")
        known = ", ".join(found)
        if not name:
            raise UserError(f"cluster.slurm.partition: missing, and there is no default; choose one of {known}")
        # Slurm takes several, separated by commas, and uses the first that fits.
        chosen = [found[one] for one in name.split(",") if one in found]
        if len(chosen) < len(name.split(",")):
            raise UserError(f"cluster.slurm.partition: {name}: no such partition; choose one of {known}")
        if not any(one.up for one in chosen):
            raise UserError(f"cluster.slurm.partition: {name} is not up; choose another of {known}")
        if self.cluster.nodes > (most := max(one.nodes for one in chosen)):
            raise UserError(f"cluster.nodes: {self.cluster.nodes}, but partition {name} has {most}; give fewer")
        limits = [one.minutes for one in chosen]
        if None not in limits and self.section.minutes > (limit := max(one for one in limits if one is not None)):
            text = f"{self.section.minutes}, but the limit of partition {name} is {limit:g}"
            raise UserError(f"cluster.slurm.minutes: {text}; give fewer")

    def check_account(self) -> None:
        """Without enforcement, Slurm takes any account."""
        if not self.section.account:
            return
        show = "sacctmgr --noheader --parsable2 show associations user=$(id -un) format=Account"
        done = self.jobs.login.run(["sh", "-c", show])
        # A cluster without accounting has no accounts.
        found = queue.accounts(done.stdout.decode(errors="replace")) if done.returncode == 0 else set()
        if found and self.section.account not in found:
            text = f"{self.section.account}: not one of yours; choose one of {', '.join(sorted(found))}"
            raise UserError(f"cluster.slurm.account: {text}")

    def variables(self) -> dict[str, str]:
        return {"tool": f"{sys.executable} -m cluster.providers.slurm.deployment", "worker": worker_files.digest()}

    def node_states(self, contract: Contract) -> dict[str, NodeState]:
        """Always ready: jobs exist only during a measurement."""
        return {name: NodeState("ready") for name in contract.nodes}

    def probed(self) -> list[NodeFacts]:
        """What the probe job of the last deploy found on the nodes; empty before it."""
        probe = self.state.dir / "probe.json"
        return files.record(probe, Probe)["nodes"] if probe.exists() else []

    def status_notes(self) -> list[str]:
        lines = [f"{self.section.login}: jobs exist only during a measurement"]
        open_jobs = self.jobs.ledger.open()
        lines += [f"job {job or 'without a known id'} ({name}) may be running" for name, job in open_jobs.items()]
        for node in self.probed():
            gpus = ", ".join(node["gpus"]) or "no GPU"
            rdma = ", ".join(node["adapters"]) or "no RDMA adapter"
            lines.append(
                f"{node['node']}: Python {node['python']}, torch {node['torch']}, Horovod {node['horovod']}, x86-64-v"
                f"{node['cpu_level']}, {node['cores']} cores, interface {node['interface']}, {rdma}, {gpus}"
                f"{', NCCL ' + node['nccl'] if node['nccl'] else ''}{'' if node['mpi'] else ', no mpirun'}"
            )
        return lines

    def remove_leftovers(self) -> None:
        self.jobs.destroy()

    def checks(self) -> list[Check]:
        try:
            version = self.jobs.login.text(["sinfo", "--version"]).strip()
        except (InfraError, UserError) as error:
            return [Check("slurm", False, str(error), "log in by ssh once, then run the same command again")]
        return [Check("slurm", True, f"{version} on {self.section.login}")]
