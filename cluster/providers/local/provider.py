"""Nodes are systemd containers on this machine; node.py creates them."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster import image
from cluster.core import root
from cluster.core.contract import Contract
from cluster.core.errors import InfraError
from cluster.core.progress import Progress
from cluster.core.state import containers_conf
from cluster.providers import ssh_server
from cluster.providers.base import Check, NodeState, Provider, Survivor, index
from cluster.providers.local import claims, machine, node
from cluster.providers.local.machine import Container, Machine

# A running node that says nothing for so long is restarted.
ANSWER_SECONDS = 10
# As in terraform/modules/nodes.
FIRST_ADDRESS = 10
TOOLS = {"podman": "podman", "runc": "runc", "mmdebstrap": "mmdebstrap", "nft": "nftables"}


@contextmanager
def podman_settings() -> Iterator[dict[str, str]]:
    """Variables for podman with settings of our own: no state folder is needed, and none is made."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as conf:
        conf.write(containers_conf())
        conf.flush()
        yield {**os.environ, "CONTAINERS_CONF": conf.name}


def look_here() -> Machine:
    with podman_settings() as settings:
        return machine.look(settings)


class Local(Provider):
    image_name = "none"
    needs_root = True
    own_key = True

    def check(self) -> None:
        claims.check(look_here(), self.state, self.cluster)

    def ensure_image(self, progress: Progress) -> str:
        self.image_name = image.ensure(self.state, self.cluster, progress)
        return self.image_name

    def planned_image(self, progress: Progress) -> None:
        self.image_name = image.name(self.cluster)
        if not image.exists(self.state, self.image_name):
            progress("image: a deploy would build it first")

    def variables(self) -> dict[str, str]:
        return {"image": self.image_name, "tool": f"{sys.executable} -m {image.NODE_TOOL}"}

    def _node_tool(self, action: str, **values: object) -> None:
        state = str(self.state.dir)
        spec = {"cluster": self.cluster.name, "ssh_port": self.cluster.ports.ssh, "state_dir": state, **values}
        env = self.state.environment() | {"INPUT": json.dumps(spec)}
        argv = [sys.executable, "-m", image.NODE_TOOL, action]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InfraError((done.stderr.strip().splitlines() or [f"podman: {action} failed without a message"])[-1])

    def node_states(self, contract: Contract) -> dict[str, NodeState]:
        own = machine.owner_of(self.state.dir)
        mine = [one for one in look_here().containers if (one.owner, one.cluster) == (own, self.cluster.name)]
        return {one.node: NodeState(one.state, one.since) for one in mine}

    def survivors(self, known: set[str]) -> list[Survivor]:
        own = machine.owner_of(self.state.dir)
        nodes = [one for one in look_here().containers if one.owner == own and one.node != "builder"]
        return [found for one in nodes if (found := self._survivor(one))]

    def _survivor(self, container: Container) -> Survivor | None:
        seed = self.state.dir / machine.SEEDS / container.node
        if not container.fingerprint:
            return Survivor(container.node, f"{container.name} was made by an earlier version")
        if not (seed / "ssh_host_ed25519_key").exists():
            return Survivor(container.node, f"the files in {seed} are gone")
        if not (seed / node.CREATED).exists():
            # Its creation was interrupted: it has never answered.
            return None
        if container.fingerprint != node.fingerprint(self._spec(container.node)):
            change = "cluster.yml now has another name, other networks or another kind of storage"
            return Survivor(container.node, change, outdated=True)
        return Survivor(container.node)

    def _spec(self, name: str) -> dict[str, Any]:
        """What Terraform gives the node tool, as far as it decides whether a node is replaced."""
        networks = self.cluster.networks.model_dump() if self.cluster.networks else {}
        addresses = {
            key: str(ipaddress.ip_network(text)[FIRST_ADDRESS + index(name)]) for key, text in networks.items()
        }
        fuse = self.cluster.storage.backend == "glusterfs"
        return {"cluster": self.cluster.name, "addresses": addresses, "fuse": fuse}

    def discard(self, names: list[str]) -> None:
        own = machine.owner_of(self.state.dir)
        for one in look_here().containers:
            if one.owner == own and one.node in names:
                with podman_settings() as settings:
                    machine.podman("rm", "-f", "-i", "-t", "0", one.name, env=settings)

    def repair(self, contract: Contract, progress: Progress) -> list[str]:
        replace = []
        states = self.node_states(contract)
        for name, one in contract.nodes.items():
            if one.index >= self.cluster.nodes:
                continue
            if name not in states:
                progress(f"node {name} is missing: creating it again")
                replace.append(self.address(name))
                continue
            current, address = states[name].state, contract.address(name)
            verb = {"paused": "unpause", "running": "restart"}.get(current, "start")
            if current == "running":
                if ssh_server.wait_for(address, self.cluster.ports.ssh, ANSWER_SECONDS):
                    continue
                current = "running, but does not answer"
            progress(f"node {name} is {current}: {verb}")
            self._node_tool("start", verb=verb, name=name, addresses={"management": address})
        return replace

    def remove_leftovers(self) -> None:
        # By name too: networks of an earlier version have no owner.
        for name in (None, self.cluster.name, f"{self.cluster.name}-build"):
            self._node_tool("remove-leftovers", cluster=name)

    def checks(self) -> list[Check]:
        found = []
        for tool, package in TOOLS.items():
            path = shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")
            found.append(Check(tool, bool(path), path or "not found", f"apt-get install {package}"))
        detail = "root or sudo without a password" if root.available() else "neither root nor sudo without a password"
        return [*found, Check("root", root.available(), detail, "run as root")]
