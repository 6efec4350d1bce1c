"""Terraform's state file: whether it can be read, and which nodes it records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster.core import files
from cluster.core.errors import UserError


def damage(path: Path) -> str:
    """What is wrong with the file; "" for one that Terraform can read, for an empty one and for none."""
    try:
        read(path)
    except UserError as error:
        return str(error)
    return ""


def read(path: Path) -> dict[str, Any]:
    """The content; {} for an empty file and for none. UserError if it is no state of Terraform."""
    content = files.text(path) if path.exists() else ""
    if not content.strip():
        return {}
    found = files.parse(content, "JSON", f"{path.name} is damaged")
    if not isinstance(found, dict) or not isinstance(found.get("version"), int):
        raise UserError(f"{path.name} is damaged: it has no version")
    lists = isinstance(found.get("resources", []), list) and isinstance(found.get("outputs", {}), dict)
    if not lists or not all(isinstance(one, dict) for one in found.get("resources", [])):
        raise UserError(f"{path.name} is damaged: resources or outputs have another type")
    return found


def nodes(path: Path) -> set[str]:
    """Names of the nodes that Terraform knows: its resources, and those of an experiment, which is one resource."""
    content = read(path)
    resources = content.get("resources", [])
    if not resources:
        return set()
    instances = [one for resource in resources if resource.get("name") == "node" for one in resource["instances"]]
    made = {str(one["index_key"]) for one in instances if "index_key" in one}
    return made or set((output(content) or {}).get("nodes", {}))


def resources(path: Path) -> dict[str, dict[str, Any]]:
    """Attributes of every resource that Terraform created, by address."""
    found = {}
    for one in read(path).get("resources", []):
        if one.get("mode") != "managed":
            continue
        name = ".".join([*([one["module"]] if "module" in one else []), one["type"], one["name"]])
        for instance in one["instances"]:
            key = f"[{json.dumps(instance['index_key'])}]" if "index_key" in instance else ""
            found[name + key] = instance.get("attributes") or {}
    return found


def identities(path: Path) -> set[tuple[str, str]]:
    """Address and identifier of every resource; a resource that was replaced has another identifier."""
    return {(address, str(found.get("id"))) for address, found in resources(path).items()}


def output(content: dict[str, Any]) -> dict[str, Any] | None:
    """The contract as it was written last, unchecked."""
    found = content.get("outputs", {}).get("cluster", {})
    return found.get("value") if isinstance(found, dict) and isinstance(found.get("value"), dict) else None


def login_key(path: Path) -> str:
    """The private key that the deployed nodes accept; "" if nothing is deployed."""
    return str(((output(read(path)) or {}).get("ssh") or {}).get("key", ""))
