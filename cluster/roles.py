"""The roles of a cluster: ansible/roles.yml in order, without those that `features` and `storage` switch off."""

from __future__ import annotations

import re
from typing import Any

from cluster.core import files
from cluster.core.config import ROOT, Cluster

APT = ("ansible.builtin.apt", "ansible.builtin.package")


def entries() -> list[dict[str, str]]:
    found: list[dict[str, str]] = files.mapping(ROOT / "ansible/roles.yml")["cluster_roles"]
    return found


def ordered() -> list[str]:
    return [entry["role"] for entry in entries()]


def active(cluster: Cluster) -> list[str]:
    """The roles that this cluster has; every cluster has those without a feature."""
    enabled = cluster.features.model_dump() | {"storage": cluster.storage.backend != "none"}
    return [entry["role"] for entry in entries() if "feature" not in entry or enabled[entry["feature"]]]


def apt_tasks(tasks: Any) -> list[Any]:
    """The `name` of every apt task, also inside blocks."""
    found = []
    for task in tasks or []:
        found += [task[module].get("name", []) for module in APT if isinstance(task.get(module), dict)]
        found += apt_tasks(task.get("block"))
    return found


def packages(role: str, pattern: str = "*.yml") -> set[str]:
    """Debian packages that the tasks of a role install, in the files that match the pattern."""
    folder = ROOT / "roles" / role
    defaults = files.mapping(folder / "defaults/main.yml")
    names: set[str] = set()
    for path in (folder / "tasks").glob(pattern):
        if path.name == "remove.yml":
            continue
        for given in apt_tasks(files.document(path)):
            variable = re.fullmatch(r"\{\{ *(\w+) *\}\}", given) if isinstance(given, str) else None
            value = defaults.get(variable[1], []) if variable else given
            names.update([value] if isinstance(value, str) else value)
    # Names that depend on the machine, such as kernel headers, are unknown here.
    return {name for name in names if "{{" not in name}
