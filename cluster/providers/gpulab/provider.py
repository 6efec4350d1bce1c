"""There are no nodes, only jobs on imec GPULab: nothing to log in to and nothing for Ansible to do."""

from __future__ import annotations

import os
import sys

from cluster.core import worker_files
from cluster.core.contract import Contract
from cluster.core.errors import UserError
from cluster.core.sections import Gpulab
from cluster.providers.base import Check, NodeState, Provider, Say, certificate_check
from cluster.providers.gpulab.cli import ensure
from cluster.providers.gpulab.deployment import Deployment

MODES = ("1xN", "Nx1")


class OnGpulab(Provider):
    machines = False

    @property
    def settings(self) -> Gpulab:
        assert self.cluster.gpulab  # noqa: S101 - config.load saw to it
        mode = os.environ.get("MODE") or self.cluster.gpulab.mode
        if mode not in MODES:
            raise UserError(f"MODE={mode}: choose 1xN (one job with N GPUs) or Nx1 (N jobs with one GPU each)")
        return self.cluster.gpulab.model_copy(update={"mode": mode})

    @property
    def deployment(self) -> Deployment:
        return Deployment(self.settings, self.state.dir, self.cluster.gpu_model)

    def image(self, say: Say) -> str:
        return self.settings.image

    def prepare(self, say: Say) -> None:
        self.deployment.cli.check()
        ensure(self.state.log("gpulab"))
        if self.settings.mode == "Nx1" and self.cluster.nodes > 1:
            say("a probe of two jobs will find out whether jobs reach each other")

    def variables(self) -> dict[str, str]:
        return {
            "tool": f"{sys.executable} -m cluster.providers.gpulab.deployment",
            "mode": self.settings.mode,
            "worker": worker_files.digest(),
        }

    def states(self, contract: Contract) -> dict[str, NodeState]:
        """Between measurements there is nothing that could run."""
        return {name: NodeState("ready") for name in contract.nodes}

    def notes(self) -> list[str]:
        deployment = self.deployment
        lines = [f"mode {self.settings.mode}; jobs exist only while the bench measures"]
        lines += [f"job {entry.name} ({entry.id or 'id not known'}) may run" for entry in deployment.ledger.open()]
        if deployment.probe_file.exists():
            lines.append(f"probe: {deployment.probe_file.read_text().strip()}")
        return lines

    def sweep(self) -> None:
        self.deployment.destroy()

    def checks(self) -> list[Check]:
        return [certificate_check(self.settings.pem, "cluster.gpulab.pem")]
