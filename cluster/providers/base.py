"""The interface of a provider, with defaults for one that needs nothing special."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.core.config import Cluster
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.core.state import State


@dataclass(frozen=True)
class Check:
    """One line of `cluster doctor`; fix is the command that repairs it."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class NodeState:
    """state: `running` or the provider's own word; since: the start time in seconds since the epoch."""

    state: str
    since: int | None = None


@dataclass(frozen=True)
class Survivor:
    """A node that exists, whatever Terraform's state says."""

    name: str
    # Why a deploy cannot keep it; "" if it can.
    obstacle: str = ""
    # The obstacle is a change of cluster.yml, because of which Terraform replaces the node even if it knows it.
    outdated: bool = False


def index(name: str) -> int:
    """The number of a node, as terraform/modules/nodes names them: head, w1, w2."""
    return 0 if name == "head" else int(name.removeprefix("w"))


class Provider:
    # False if there are no machines to log in to and to configure with Ansible.
    has_nodes = True
    # Whether creating and removing nodes takes root on this machine.
    needs_root = False
    # Whether nodes accept only the key in the state folder.
    own_key = False
    # What a destroy says at its end.
    removed = "everything is removed"
    # Whether renew changes nothing that a measurement or a deploy uses.
    renews_during_runs = False

    def __init__(self, state: State, cluster: Cluster) -> None:
        self.state, self.cluster = state, cluster
        # The provider's own section of cluster.yml, which config.load requires; local has none.
        self.section: Any = getattr(cluster, cluster.provider, None)

    def check(self) -> None:
        """Raise UserError for what cluster.yml requests and this machine or provider cannot give. Change nothing."""

    def ensure_image(self, progress: Progress) -> str:
        """Build the image that nodes boot from, if it is missing. Return its name, or "" if Ansible installs it all."""
        return ""

    def planned_image(self, progress: Progress) -> None:
        """For a plan: name the image that a deploy would use, without building it."""

    def prepare(self, progress: Progress) -> None:
        """Check credentials and hosts before Terraform runs; raise UserError if something is wrong."""

    def rates(self) -> dict[str, float]:
        """Gbit/s of fabrics with `rate_gbps: auto`, as prepare found them."""
        return {}

    def variables(self) -> dict[str, str]:
        """Terraform variables of this root, in addition to cluster_file and state_dir."""
        return {}

    def node_states(self, contract: Contract) -> dict[str, NodeState]:
        """The actual state of the nodes, whatever Terraform's state says. A node that no longer exists is left out."""
        return {name: NodeState("running") for name in contract.nodes}

    def before_apply(self, progress: Progress) -> None:
        """Remove what an interrupted apply created and Terraform's state does not record."""

    def after_failure(self, error: InfraError, created: dict[str, str], undo: Callable[[], None] | None) -> InfraError:
        """After a failed apply: the error to report.

        created: Terraform address -> identifier of what this apply created. undo removes all of it; it is None if
        something existed before, which must stay.
        """
        return error

    def repair(self, contract: Contract, progress: Progress) -> list[str]:
        """Start stopped nodes; return the Terraform addresses of resources that must be replaced."""
        return []

    def survivors(self, known: set[str]) -> list[Survivor]:
        """Nodes of this environment that exist and hold data; known are those in Terraform's state."""
        return []

    def discard(self, names: list[str]) -> None:
        """Remove survivors that Terraform does not know, if remove_leftovers and a deploy do not."""

    def address(self, name: str) -> str:
        """Terraform's address of a node."""
        return f'terraform_data.node["{name}"]'

    def wait_for_nodes(self, contract: Contract, progress: Progress) -> None:
        """After Terraform, before Ansible: wait until the nodes answer and pin their host keys."""

    def learn(self, contract: Contract) -> bool:
        """Ask the nodes what only they know. True if Terraform's output must be made again with the answers."""
        return False

    @property
    def changes(self) -> Path | None:
        """File in which Ansible records what it changes on nodes that are not ours alone."""
        return None

    def configured(self, progress: Progress) -> None:
        """After Ansible, also if it failed."""

    def remove_leftovers(self) -> None:
        """Remove resources that Terraform does not know; raise InfraError for those that cannot be removed."""

    def status_notes(self) -> list[str]:
        """Lines for `cluster status` about the cluster as a whole, such as when it expires."""
        return []

    def renew(self) -> str:
        """Extend the lifetime of the nodes; return the line to print."""
        raise UserError(f"ENV={self.state.env}: provider {self.cluster.provider} has no reservation to renew")

    def checks(self) -> list[Check]:
        """This provider's lines of `cluster doctor`."""
        return []
