"""Nodes are bare metal on the imec Virtual Wall; cluster/virtualwall asks for them."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.sections import VirtualWall
from cluster.providers.base import Check, NodeState, Provider, Say, certificate_check
from cluster.providers.virtualwall.experiment import Experiment


class OnVirtualWall(Provider):
    @property
    def settings(self) -> VirtualWall:
        assert self.cluster.virtualwall  # noqa: S101 - config.load saw to it
        return self.cluster.virtualwall

    @property
    def experiment(self) -> Experiment:
        return Experiment(self.cluster.name, self.settings, self.state.dir)

    def prepare(self, say: Say) -> None:
        key = Path(self.settings.ssh_key).expanduser()
        if not key.is_file():
            raise UserError(f"cluster.virtualwall.ssh_key: {key} does not exist; name the key your account has")
        self.experiment.tool.check()

    def variables(self) -> dict[str, str]:
        return {"tool": f"{sys.executable} -m cluster.providers.virtualwall.experiment"}

    def states(self, contract: Contract) -> dict[str, NodeState]:
        """The testbed has no word on single nodes that we can ask for: expired, or what SSH says of them (status)."""
        end = self.expiry()
        expired = end is None or end < datetime.now(UTC)
        return {name: NodeState("expired" if expired else "running") for name in contract.nodes}

    def expiry(self) -> datetime | None:
        record = self.experiment.read()
        return datetime.fromisoformat(record["expires"]) if record and "expires" in record else None

    def repair(self, contract: Contract, say: Say) -> list[str]:
        end = self.expiry()
        if end is None or end < datetime.now(UTC):
            say("the experiment has expired: asking for another")
            return ["terraform_data.experiment"]
        return []

    def notes(self) -> list[str]:
        end = self.expiry()
        if end is None:
            return ["no experiment is known"]
        left = end - datetime.now(UTC)
        text = f"in {left.total_seconds() / 3600:.1f} hours" if left.total_seconds() > 0 else "that was in the past"
        return [
            f"experiment {self.cluster.name} expires {end:%Y-%m-%d %H:%M} UTC, {text}; make renew ENV={self.state.env}"
        ]

    def renew(self) -> str:
        return f"experiment {self.cluster.name} now expires {self.experiment.renew()}"

    def sweep(self) -> None:
        self.experiment.delete()

    def checks(self) -> list[Check]:
        found = [certificate_check(self.settings.pem, "cluster.virtualwall.pem")] if self.settings.pem else []
        try:
            self.prepare(lambda _: None)
            found.append(Check(self.settings.backend, True, "can be used"))
        except (UserError, InfraError) as error:
            found.append(Check(self.settings.backend, False, str(error), "see docs/virtualwall.md"))
        return found
