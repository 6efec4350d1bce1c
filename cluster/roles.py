"""The roles of a cluster: ansible/roles.yml in order, without those that `features` and `storage` switch off."""

from __future__ import annotations

from cluster.core import files
from cluster.core.config import ROOT, Cluster


def entries() -> list[dict[str, str]]:
    found: list[dict[str, str]] = files.mapping(ROOT / "ansible/roles.yml")["cluster_roles"]
    return found


def ordered() -> list[str]:
    return [entry["role"] for entry in entries()]


def active(cluster: Cluster) -> list[str]:
    """The roles that this cluster has; every cluster has those without a feature."""
    enabled = cluster.features.model_dump() | {"storage": cluster.storage.backend != "none"}
    return [entry["role"] for entry in entries() if "feature" not in entry or enabled[entry["feature"]]]
