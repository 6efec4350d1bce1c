"""Nodes are systemd containers on this machine; node.py creates them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from cluster import image
from cluster.core.contract import Contract
from cluster.core.errors import InfraError
from cluster.core.progress import Progress
from cluster.providers.base import Check, NodeState, Provider

TOOLS = {"podman": "podman", "runc": "runc", "mmdebstrap": "mmdebstrap", "nft": "nftables"}


class Local(Provider):
    image_name = "none"

    def ensure_image(self, progress: Progress) -> str:
        self.image_name = image.ensure(self.state, self.cluster, progress)
        return self.image_name

    def variables(self) -> dict[str, str]:
        return {"image": self.image_name, "tool": f"{sys.executable} -m {image.NODE_TOOL}"}

    def _node_tool(self, action: str, **values: object) -> str:
        spec = {"cluster": self.cluster.name, "ssh_port": self.cluster.ports.ssh, **values}
        env = self.state.environment() | {"INPUT": json.dumps(spec)}
        argv = [sys.executable, "-m", image.NODE_TOOL, action]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InfraError(done.stderr.strip())
        return done.stdout

    def node_states(self, contract: Contract) -> dict[str, NodeState]:
        return {name: NodeState(**found) for name, found in json.loads(self._node_tool("states")).items()}

    def repair(self, contract: Contract, progress: Progress) -> list[str]:
        replace = []
        states = self.node_states(contract)
        for name, node in contract.nodes.items():
            if node.index >= self.cluster.nodes:
                continue
            if name not in states:
                progress(f"node {name} is missing: creating it again")
                replace.append(f'terraform_data.node["{name}"]')
            elif states[name].state != "running":
                progress(f"node {name} is {states[name].state}: starting it")
                self._node_tool("start", name=name, addresses={"management": node.management_address})
        return replace

    def remove_leftovers(self) -> None:
        for name in (self.cluster.name, f"{self.cluster.name}-build"):
            self._node_tool("remove-leftovers", cluster=name)

    def checks(self) -> list[Check]:
        found = []
        for tool, package in TOOLS.items():
            path = shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")
            found.append(Check(tool, bool(path), path or "not found", f"apt-get install {package}"))
        root = os.geteuid() == 0 or subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0
        detail = "root or sudo without a password" if root else "neither root nor sudo without a password"
        return [*found, Check("root", root, detail, "run as root")]
