"""Nodes are systemd containers on this machine; node.py makes them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from cluster import image
from cluster.core.contract import Contract
from cluster.core.errors import InfraError
from cluster.providers.base import Check, NodeState, Provider, Say

TOOLS = {"podman": "podman", "runc": "runc", "mmdebstrap": "mmdebstrap", "nft": "nftables"}


class Local(Provider):
    booted = "none"

    def image(self, say: Say) -> str:
        self.booted = image.ensure(self.state, self.cluster, say)
        return self.booted

    def variables(self) -> dict[str, str]:
        return {"image": self.booted, "tool": f"{sys.executable} -m {image.NODE_TOOL}"}

    def _tool(self, action: str, cluster: str = "", **values: object) -> str:
        spec = {"cluster": cluster or self.cluster.name, "ssh_port": self.cluster.ports.ssh, **values}
        env = self.state.environment() | {"INPUT": json.dumps(spec)}
        argv = [sys.executable, "-m", image.NODE_TOOL, action]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InfraError(done.stderr.strip())
        return done.stdout

    def states(self, contract: Contract) -> dict[str, NodeState]:
        return {name: NodeState(**found) for name, found in json.loads(self._tool("states")).items()}

    def repair(self, contract: Contract, say: Say) -> list[str]:
        replace = []
        real = self.states(contract)
        for name, node in contract.nodes.items():
            if node.index >= self.cluster.nodes:
                continue
            if name not in real:
                say(f"node {name} is gone: creating it again")
                replace.append(f'terraform_data.node["{name}"]')
            elif real[name].state != "running":
                say(f"node {name} is {real[name].state}: starting it")
                self._tool("start", name=name, addresses={"management": node.management_address})
        return replace

    def sweep(self) -> None:
        for name in (self.cluster.name, f"{self.cluster.name}-build"):
            self._tool("sweep", cluster=name)

    def checks(self) -> list[Check]:
        found = []
        for tool, package in TOOLS.items():
            path = shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")
            found.append(Check(tool, bool(path), path or "not found", f"apt-get install {package}"))
        root = os.geteuid() == 0 or subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0
        detail = "root or sudo without a password" if root else "neither root nor sudo"
        return [*found, Check("root", root, detail, "run as root")]
