"""Nodes are bare-metal machines on the imec Virtual Wall; experiment.py reserves them."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from cluster.core import files, sections
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.providers import neighbours
from cluster.providers.base import Check, NodeState, Provider, Survivor
from cluster.providers.testbed import certificate_check
from cluster.providers.virtualwall.experiment import Experiment, Nodes


class VirtualWall(Provider):
    section: sections.VirtualWall

    @property
    def experiment(self) -> Experiment:
        return Experiment(self.cluster.name, self.section, self.state.dir)

    def check(self) -> None:
        if self.cluster.ports.ssh != 22:
            raise UserError("cluster.ports.ssh: nodes of the testbed listen on port 22; set it to 22")
        neighbours.refuse_shared_name(self.state, self.cluster)

    def prepare(self, progress: Progress) -> None:
        key = Path(self.section.ssh_key).expanduser()
        if not key.is_file():
            raise UserError(f"cluster.virtualwall.ssh_key: {key} does not exist; use the key of your testbed account")
        self.experiment.control_plane.check()

    def variables(self) -> dict[str, str]:
        return {"tool": f"{sys.executable} -m cluster.providers.virtualwall.experiment"}

    def node_states(self, contract: Contract) -> dict[str, NodeState]:
        """The testbed does not report the state of single nodes, so only expiry is known here; status adds SSH."""
        return {name: NodeState("expired" if self.expired() else "running") for name in contract.nodes}

    def survivors(self, known: set[str]) -> list[Survivor]:
        if known or self.experiment.read_record().get("state") != "ready" or self.expired():
            return []
        names = files.record(self.experiment.nodes_file, Nodes)["addresses"]
        return [Survivor(name, f"Terraform cannot adopt experiment {self.cluster.name}") for name in names]

    def expiry(self) -> datetime | None:
        return self.experiment.read_record().get("expires")

    def expired(self) -> bool:
        end = self.expiry()
        return end is None or end < datetime.now(UTC)

    def repair(self, contract: Contract, progress: Progress) -> list[str]:
        if not self.expired():
            return []
        progress("the experiment has expired: requesting a new one")
        return ["terraform_data.experiment"]

    def status_notes(self) -> list[str]:
        end = self.expiry()
        if end is None:
            return ["there is no experiment"]
        hours = (end - datetime.now(UTC)).total_seconds() / 3600
        text = f"expires in {hours:.1f} hours" if hours > 0 else "has expired"
        renew = f"make renew ENV={self.state.env}"
        return [f"experiment {self.cluster.name} {text} ({end:%Y-%m-%d %H:%M} UTC); to extend it: {renew}"]

    def renew(self) -> str:
        return f"experiment {self.cluster.name} now expires {self.experiment.renew()}"

    def remove_leftovers(self) -> None:
        self.experiment.delete()

    def checks(self) -> list[Check]:
        found = [certificate_check(self.section.pem, "cluster.virtualwall.pem")] if self.section.pem else []
        try:
            self.prepare(Progress(stderr=True))
            found.append(Check(self.section.backend, True, "ready"))
        except (UserError, InfraError) as error:
            found.append(Check(self.section.backend, False, str(error), "see docs/virtualwall.md"))
        return found
