"""What deploy, status, doctor and destroy ask of a provider; here, the answers of one that needs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.core.config import Cluster
from cluster.core.contract import Contract
from cluster.core.errors import UserError
from cluster.core.state import State
from cluster.providers import certificate

Say = Callable[[str], None]


@dataclass(frozen=True)
class Check:
    """One line of doctor: fix is the command that mends it."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def certificate_check(pem: str, field: str) -> Check:
    """Doctor's line about the certificate of a testbed's user."""
    try:
        end = certificate.expiry(certificate.check(pem, field))
    except UserError as error:
        return Check("certificate", False, str(error), "download it from the account portal")
    return Check("certificate", True, f"valid until {end:%Y-%m-%d}")


@dataclass(frozen=True)
class NodeState:
    """state is `running` or the provider's own word for why not; since is in seconds of the epoch."""

    state: str
    since: int | None = None


class Provider:
    # Whether there are machines to log in to, which Ansible configures and status asks.
    machines = True

    def __init__(self, state: State, cluster: Cluster) -> None:
        self.state, self.cluster = state, cluster

    def image(self, say: Say) -> str:
        """Make the image that nodes boot from; empty where nodes get everything from Ansible."""
        return ""

    def prepare(self, say: Say) -> None:
        """Before Terraform: what must be true of the outside world, or a UserError."""

    def variables(self) -> dict[str, str]:
        """What this provider's Terraform root takes besides cluster_file, nodes and state_dir."""
        return {}

    def environment(self) -> dict[str, str]:
        """What its Terraform needs in the environment on top of State.environment()."""
        return {}

    def states(self, contract: Contract) -> dict[str, NodeState]:
        """What the nodes really are, whatever Terraform believes. A node that is missing here is gone."""
        return {name: NodeState("running") for name in contract.nodes}

    def repair(self, contract: Contract, say: Say) -> list[str]:
        """Start what stopped; return the Terraform addresses of what is gone and must be made again."""
        return []

    def applied(self, contract: Contract, say: Say) -> None:
        """After Terraform, before Ansible: until nodes answer and their host keys are known."""

    def sweep(self) -> None:
        """Remove what Terraform does not know of; InfraError names what cannot be removed."""

    def notes(self) -> list[str]:
        """Lines for status that are about the whole: when it expires, what else may run."""
        return []

    def renew(self) -> str:
        """Keep the nodes for longer; the line to show then."""
        raise UserError(f"ENV={self.state.env}: provider {self.cluster.provider} does not expire; nothing to renew")

    def checks(self) -> list[Check]:
        return []
