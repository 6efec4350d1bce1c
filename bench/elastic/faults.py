"""Faults of a node that runs ranks. Those of a whole node need local nodes, which podman stops and pauses."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.run import nodes
from cluster.core import ssh
from cluster.core.contract import Contract
from cluster.core.errors import InfraError
from cluster.providers.local import machine

# The brackets keep pkill from finding the shell that runs it.
SCRIPT = "[i]magenet_elastic"


@dataclass(frozen=True)
class Target:
    contract: Contract
    run: str
    node: str

    def podman(self, *words: str) -> None:
        # With the cluster's settings, which podman reads again when it restarts a node. By default it may not know the
        # networks.
        settings = {**os.environ, "CONTAINERS_CONF": str(Path(self.contract.login.key).with_name("containers.conf"))}
        machine.podman(*words, f"{self.contract.name}-{self.node}", env=settings)

    def shell(self, node: str, command: str) -> None:
        done = ssh.gather({node: ssh.as_training_account(self.contract, node, ["sh", "-c", command])})[node]
        if done.returncode:
            raise InfraError(f"node {node}: {command}: {done.stderr.strip() or 'failed'}")


def kill_rank(target: Target) -> None:
    target.shell(target.node, f"pkill -9 -f {SCRIPT}")


def stop_node(target: Target) -> None:
    target.podman("stop", "-t", "0")


def start_node(target: Target) -> None:
    target.podman("start")


def pause_node(target: Target) -> None:
    target.podman("pause")


def resume_node(target: Target) -> None:
    target.podman("unpause")


def drain_node(target: Target) -> None:
    """What the agent does on a node that AWS takes back (bench/worker/run_drain.py)."""
    folder = f"{nodes.share_folder(target.contract, target.run)}/draining"
    target.shell(target.contract.head, f"mkdir -p {folder} && touch {folder}/{target.node}")


def return_node(target: Target) -> None:
    folder = f"{nodes.share_folder(target.contract, target.run)}/draining"
    target.shell(target.contract.head, f"rm {folder}/{target.node}")


def nothing(target: Target) -> None:
    """The rank comes back by itself."""


@dataclass(frozen=True)
class Fault:
    """repair ends the fault; what that costs is measured too, if it has a name."""

    name: str
    inject: Callable[[Target], None]
    repair: Callable[[Target], None]
    repaired: str
    local: bool = True
    rank0: bool = False


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("rank killed", kill_rank, nothing, "", local=False),
        Fault("node stopped", stop_node, start_node, "node back"),
        Fault("node paused", pause_node, resume_node, "node resumed"),
        Fault("node of rank 0 stopped", stop_node, start_node, "node of rank 0 back", rank0=True),
        Fault("node drained", drain_node, return_node, "node undrained", local=False),
    )
}
