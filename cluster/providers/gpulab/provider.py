"""Jobs on imec GPULab instead of nodes: nothing to log in to, and nothing for Ansible to configure."""

from __future__ import annotations

import os
import sys

from cluster.core import files, sections, worker_files
from cluster.core.config import Cluster
from cluster.core.contract import Contract
from cluster.core.errors import UserError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers.base import Check, NodeState, Provider
from cluster.providers.gpulab import cli
from cluster.providers.gpulab.deployment import Deployment
from cluster.providers.testbed import certificate_check


class Gpulab(Provider):
    has_nodes = False
    section: sections.Gpulab

    def __init__(self, state: State, cluster: Cluster) -> None:
        super().__init__(state, cluster)
        mode = os.environ.get("MODE") or self.section.mode
        if mode not in ("1xN", "Nx1"):
            raise UserError(f"MODE={mode}: use 1xN (one job with N GPUs) or Nx1 (N jobs with one GPU each)")
        self.section = self.section.model_copy(update={"mode": mode})
        self.deployment = Deployment(self.section, state.dir, cluster.gpu_model)

    def ensure_image(self, progress: Progress) -> str:
        return self.section.image

    def prepare(self, progress: Progress) -> None:
        self.deployment.cli.check()
        cli.ensure(self.state.log("gpulab"))
        if self.section.mode == "Nx1" and self.cluster.nodes > 1:
            progress("two probe jobs will test whether jobs can reach each other")

    def variables(self) -> dict[str, str]:
        tool = f"{sys.executable} -m cluster.providers.gpulab.deployment"
        return {"tool": tool, "mode": self.section.mode, "worker": worker_files.digest()}

    def node_states(self, contract: Contract) -> dict[str, NodeState]:
        """Always ready: jobs exist only during a measurement."""
        return {name: NodeState("ready") for name in contract.nodes}

    def status_notes(self) -> list[str]:
        open_jobs, probe_file = self.deployment.ledger.open(), self.deployment.probe_file
        lines = [f"mode {self.section.mode}; jobs exist only during a measurement"]
        lines += [f"job {name} ({identifier or 'id unknown'}) may be running" for name, identifier in open_jobs.items()]
        if probe_file.exists():
            lines.append(f"probe: {files.text(probe_file).strip()}")
        return lines

    def remove_leftovers(self) -> None:
        self.deployment.destroy()

    def checks(self) -> list[Check]:
        return [certificate_check(self.section.pem, "cluster.gpulab.pem")]
