"""Which roles a cluster's nodes get: ansible/roles.yml orders them, `features` and `storage` in cluster.yml switch some
off."""

from __future__ import annotations

from typing import Any

import yaml

from cluster.core.config import ROOT, Cluster


def entries() -> list[dict[str, str]]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "ansible/roles.yml").read_text())
    found: list[dict[str, str]] = content["cluster_roles"]
    return found


def ordered() -> list[str]:
    return [entry["role"] for entry in entries()]


def active(cluster: Cluster) -> list[str]:
    """Roles without a feature are what every cluster is made of."""
    switched = cluster.features.model_dump() | {"storage": cluster.storage.backend != "none"}
    return [entry["role"] for entry in entries() if "feature" not in entry or switched[entry["feature"]]]
