#!/usr/bin/env python3
"""The nodes of one scenario: create, destroy and restart them, and describe them to Ansible.

    nodes.py create | destroy | restart NODE | --list

The scenario is the folder in MOLECULE_SCENARIO_DIRECTORY; its platforms say which nodes there are and from which image
(node: every role's install half is there; base: bare Debian) they boot. Every role has its own cluster name, subnets,
keys and known hosts, so scenarios neither meet each other nor a deployed cluster.
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

from cluster import config, image
from cluster import roles as cluster_roles
from cluster.config import ROOT, Cluster
from cluster.contract import Contract, parse
from cluster.state import State

NETWORKS = ip_network("10.78.0.0/16")
FIRST_ADDRESS = 10


def roles() -> list[str]:
    """Roles that have a scenario, in the order in which a node gets them."""
    ordered = cluster_roles.ordered()
    found = {path.parents[2].name for path in ROOT.glob("roles/*/molecule/default/molecule.yml")}
    return [role for role in ordered if role in found] + sorted(found - set(ordered))


def dynamic_inventory() -> ModuleType:
    spec = importlib.util.spec_from_file_location("terraform_inventory", ROOT / "inventories/terraform.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Scenario:
    def __init__(self, role: str) -> None:
        self.role = role
        self.state = State(f"molecule-{role}")
        self.folder = ROOT / "roles" / role / "molecule/default"
        self.platforms: list[dict[str, Any]] = yaml.safe_load((self.folder / "molecule.yml").read_text())["platforms"]

    @classmethod
    def current(cls) -> Scenario:
        return cls(Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"]).parents[1].name)

    @cached_property
    def cluster(self) -> Cluster:
        """The local environment's cluster.yml, on networks of its own."""
        position = roles().index(self.role)
        management, fabric = list(NETWORKS.subnets(new_prefix=24))[2 * position : 2 * position + 2]
        changed = {
            "name": f"molecule-{self.role}",
            "nodes": len(self.platforms),
            "networks": {"management": str(management), "fabric": str(fabric)},
            "admin_cidrs": [f"{management[1]}/32"],
        }
        return Cluster.model_validate(config.load("local").model_dump() | changed)

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
            "image": os.environ.get(f"{platform['image'].upper()}_IMAGE", ""),
            "state_dir": str(self.state.dir),
        }

    def contract(self) -> Contract:
        """What Terraform would have said of the platforms that are in the group cluster."""
        nodes = {}
        for position, platform in enumerate(self.platforms):
            if "cluster" in platform["groups"]:
                addresses = self.addresses(position)
                nodes[platform["name"]] = {
                    "index": position,
                    "role": "head" if "head" in platform["groups"] else "worker",
                    "management_address": addresses["management"],
                    "fabric_addresses": dict.fromkeys(self.cluster.fabrics, addresses["fabric"]),
                    "gpus": 0,
                    "gpu_model": "none",
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
                "storage": {"backend": "none", "server": "head", "path": "/shared"},
            }
        )

    def inventory(self) -> dict[str, Any]:
        module = dynamic_inventory()
        contract = self.contract()
        found: dict[str, Any] = module.inventory(contract, self.state, self.cluster)
        found["all"]["vars"] = {
            **module.ssh_vars(contract),
            "cluster": self.cluster.model_dump(),
            "versions": config.versions(),
        }
        for position, platform in enumerate(self.platforms):
            found["_meta"]["hostvars"].setdefault(
                platform["name"], {"ansible_host": self.addresses(position)["management"]}
            )
        return found

    def tool(self, action: str, spec: dict[str, Any]) -> None:
        env = self.state.environment() | {"INPUT": json.dumps(spec)}
        done = subprocess.run([sys.executable, image.NODE_TOOL, action], env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{self.role}: {action}: {done.stderr.strip()}")

    def create(self) -> None:
        self.destroy()
        for name, subnet in self.cluster.networks.model_dump().items():
            spec = {"name": f"{self.cluster.name}-{name}", "subnet": subnet, "internal": name == "fabric"}
            self.tool("create-network", spec | {"cluster": self.cluster.name})
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda i: self.tool("create-node", self.spec(i)), range(len(self.platforms))))

    def destroy(self) -> None:
        self.tool("sweep", {"cluster": self.cluster.name})
        self.state.known_hosts.unlink(missing_ok=True)

    def restart(self, node: str) -> None:
        """As a power cycle does: whatever is only in memory is gone."""
        position = [platform["name"] for platform in self.platforms].index(node)
        name = f"{self.cluster.name}-{node}"
        argv = [*image.sudo(), "podman", "stop", "-t", "10", name]
        subprocess.run(argv, env=self.state.environment(), check=True, capture_output=True)
        self.tool("start", self.spec(position))


def main(argv: list[str]) -> int:
    scenario = Scenario.current()
    match argv:
        case ["create"]:
            scenario.create()
        case ["destroy"]:
            scenario.destroy()
        case ["restart", node]:
            scenario.restart(node)
        case ["--list"]:
            print(json.dumps(scenario.inventory()))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
