#!/usr/bin/env python3
"""The nodes of one scenario: create, destroy and restart them, and describe them to Ansible.

    nodes.py --list      the inventory

The scenario is the folder in MOLECULE_SCENARIO_DIRECTORY. Its platforms list the nodes and their image (node: with
every role's install half; base: bare Debian). An optional cluster.yml changes the cluster of inventories/local. An
optional vars.yml sets variables of the role. Every scenario has its own cluster name, subnets, keys and known hosts, so
scenarios conflict neither with each other nor with a deployed cluster. WITHOUT=NODE leaves that node out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from ipaddress import ip_network
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from cluster import image, wheelhouse
from cluster import roles as cluster_roles
from cluster.core import config
from cluster.core.config import ROOT, Cluster
from cluster.core.contract import Contract, parse
from cluster.core.errors import InfraError
from cluster.core.sections import Storage
from cluster.core.state import State

NETWORKS = ip_network("10.78.0.0/16")
FIRST_ADDRESS = 10
# Too large for every run; make test-cuda runs them.
ON_REQUEST = ("horovod/cuda", "horovod/cuda12", "nvidia_driver/forced")


def scenarios() -> list[str]:
    """Every scenario, as ROLE (its default) or ROLE/SCENARIO, in the order in which a node gets the roles."""
    ordered = cluster_roles.ordered()
    found = [(path.parents[2].name, path.parent.name) for path in ROOT.glob("roles/*/molecule/*/molecule.yml")]
    found.sort(key=lambda one: (ordered.index(one[0]) if one[0] in ordered else len(ordered), one[0], one[1]))
    return [role if name == "default" else f"{role}/{name}" for role, name in found]


def dynamic_inventory() -> ModuleType:
    spec = importlib.util.spec_from_file_location("terraform_inventory", ROOT / "inventories/terraform.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheelhouses_of(platform: dict[str, Any]) -> list[str]:
    """Large wheelhouses that a platform mounts instead of copying."""
    return [platform["wheelhouse"]] if "wheelhouse" in platform else []


class Scenario:
    def __init__(self, key: str) -> None:
        self.key = key
        self.role, _, name = key.partition("/")
        self.name = name or "default"
        # Two checkouts may use the same number, and so the same names and subnets: run.py makes the second wait.
        self.number = scenarios().index(key)
        self.state = State(f"molecule-{key.replace('/', '-')}")
        self.folder = ROOT / "roles" / self.role / "molecule" / self.name
        variables = self.folder / "vars.yml"
        self.variables: dict[str, Any] = yaml.safe_load(variables.read_text()) if variables.exists() else {}
        self.platforms: list[dict[str, Any]] = yaml.safe_load((self.folder / "molecule.yml").read_text())["platforms"]

    @classmethod
    def current(cls) -> Scenario:
        folder = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"])
        role = folder.parents[1].name
        return cls(role if folder.name == "default" else f"{role}/{folder.name}")

    @cached_property
    def cluster(self) -> Cluster:
        """The local environment's cluster.yml with the scenario's changes and its own networks."""
        management, fabric = list(NETWORKS.subnets(new_prefix=24))[2 * self.number : 2 * self.number + 2]
        file = self.folder / "cluster.yml"
        changed: dict[str, Any] = yaml.safe_load(file.read_text()) if file.exists() else {}
        changed |= {
            "name": f"molecule-{self.number}",
            "nodes": len(self.platforms),
            "networks": {"management": str(management), "fabric": str(fabric)},
            "admin_cidrs": [f"{management[1]}/32"],
        }
        local = config.load("local")
        storage = Storage.model_validate(changed.pop("storage", local.storage.model_dump()))
        # The storage bypasses the check of the provider: a scenario may test a backend that local does not offer.
        return Cluster.model_validate(local.model_dump() | changed).model_copy(update={"storage": storage})

    def addresses(self, position: int) -> dict[str, str]:
        networks = self.cluster.networks.model_dump().items()
        return {name: str(ip_network(subnet)[FIRST_ADDRESS + position]) for name, subnet in networks}

    def spec(self, position: int) -> dict[str, Any]:
        platform = self.platforms[position]
        return {
            "cluster": self.cluster.name,
            "name": platform["name"],
            "addresses": self.addresses(position),
            "ssh_port": self.cluster.ports.ssh,
            "image": os.environ.get(self.image_variable(platform), ""),
            "state_dir": str(self.state.dir),
            "fuse": self.cluster.storage.backend != "none",
            "capabilities": platform.get("capabilities", []),
            # The role copies a wheelhouse that is not mounted.
            "mounts": {
                str(wheelhouse.folder(name, self.cluster.os_release)): image.ON_NODE[name]
                for name in wheelhouses_of(platform)
                if name in image.ON_NODE
            },
        }

    def image_variable(self, platform: dict[str, Any]) -> str:
        """Name of the environment variable with the image that a platform boots (set by run.py)."""
        return f"{platform['image']}_{self.cluster.os_release}_IMAGE".upper()

    def contract(self) -> Contract:
        """Terraform's output for the platforms in the group cluster."""
        nodes = {}
        for position, platform in enumerate(self.platforms):
            if "cluster" in platform["groups"] and platform["name"] != os.environ.get("WITHOUT"):
                addresses = self.addresses(position)
                nodes[platform["name"]] = {
                    "index": position,
                    "role": "head" if "head" in platform["groups"] else "worker",
                    "management_address": addresses["management"],
                    "fabric_addresses": dict.fromkeys(self.cluster.fabrics, addresses["fabric"]),
                    "gpus": platform.get("gpus", 0),
                    "gpu_model": platform.get("gpu_model", "none"),
                }
        fabrics = {
            name: {"interface": "fabric0", "subnet": self.cluster.networks.fabric, **fabric.model_dump()}
            for name, fabric in self.cluster.fabrics.items()
        }
        ssh = {"user": "ops", "key": str(self.state.key), "known_hosts": str(self.state.known_hosts)}
        return parse(
            {
                **{"name": self.cluster.name, "provider": "local", "ssh": ssh, "nodes": nodes, "fabrics": fabrics},
                **{"active_fabric": self.cluster.active_fabric},
                "storage": {"server": "head", **self.cluster.storage.model_dump()},
            }
        )

    def inventory(self) -> dict[str, Any]:
        module = dynamic_inventory()
        contract = self.contract()
        found: dict[str, Any] = module.inventory(contract, self.state, self.cluster)
        found["all"]["vars"] = {
            **module.ssh_vars(contract),
            "cluster": self.cluster.model_dump(),
            **self.variables,
        }
        for position, platform in enumerate(self.platforms):
            found["_meta"]["hostvars"].setdefault(
                platform["name"], {"ansible_host": self.addresses(position)["management"]}
            )
        return found

    def tool(self, action: str, spec: dict[str, Any]) -> None:
        env = self.state.environment() | {"INPUT": json.dumps({"state_dir": str(self.state.dir), **spec})}
        argv = [sys.executable, "-m", image.NODE_TOOL, action]
        done = subprocess.run(argv, env=env, capture_output=True, text=True)
        if done.returncode:
            raise InfraError(f"{self.key}: {action}: {done.stderr.strip()}")

    def create(self) -> None:
        self.destroy()
        for name, subnet in self.cluster.networks.model_dump().items():
            spec = {"name": f"{self.cluster.name}-{name}", "subnet": subnet, "internal": name == "fabric"}
            self.tool("create-network", spec | {"cluster": self.cluster.name})
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda i: self.tool("create-node", self.spec(i)), range(len(self.platforms))))

    def destroy(self) -> None:
        self.tool("remove-leftovers", {"cluster": self.cluster.name})
        self.state.known_hosts.unlink(missing_ok=True)

    def restart(self, node: str) -> None:
        """Restart the node as a power cycle would: everything in memory is lost."""
        position = [platform["name"] for platform in self.platforms].index(node)
        name = f"{self.cluster.name}-{node}"
        argv = [*image.sudo(), "podman", "stop", "-t", "10", name]
        subprocess.run(argv, env=self.state.environment(), check=True, capture_output=True)
        self.tool("start", self.spec(position))


def main(argv: list[str]) -> int:
    if argv != ["--list"]:
        print(__doc__, file=sys.stderr)
        return 2
    print(json.dumps(Scenario.current().inventory()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
