"""The other environments that are deployed, and the words for them."""

from __future__ import annotations

from pathlib import Path

from cluster.core import config
from cluster.core.config import ROOT, Cluster
from cluster.core.errors import UserError
from cluster.core.state import State


def environment_of(owner: str) -> str:
    """The words for a state folder: ENV=name, with its checkout if that is not this one."""
    folder = Path(owner)
    checkout = folder.parent.parent
    where = "" if checkout == ROOT.resolve() else f" of {checkout}"
    gone = "" if folder.exists() else ", whose state folder is gone"
    return f"ENV={folder.name}{where}{gone}" if folder.parent.name == ".state" else owner


def deployed() -> dict[str, Cluster]:
    """Environments of this checkout that are deployed: state folder -> the cluster as deployed."""
    found = {}
    for path in sorted(ROOT.glob(".state/*/cluster.yml")):
        try:
            found[str(path.parent.resolve())] = config.read(path)
        except UserError:
            continue
    return found


def refuse_shared_name(state: State, cluster: Cluster) -> None:
    """A testbed or cloud knows a cluster by its name: a second one would change and remove the first."""
    own = str(state.dir.resolve())
    for folder, other in deployed().items():
        if folder != own and (other.provider, other.name) == (cluster.provider, cluster.name):
            fix = "write another name, or run `make env NAME=...`, which makes such a copy"
            raise UserError(f"cluster.name: {cluster.name} is in use by {environment_of(folder)}; {fix}")
