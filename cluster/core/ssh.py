"""SSH to a node as the contract says: this deployment's key, the pinned host keys, nothing else."""

from __future__ import annotations

from cluster.core.contract import Contract


def options(contract: Contract) -> list[str]:
    """What every connection is given, Ansible's too."""
    given = [
        f"UserKnownHostsFile={contract.ssh.known_hosts}",
        "GlobalKnownHostsFile=/dev/null",
        "StrictHostKeyChecking=yes",
        "IdentitiesOnly=yes",
    ]
    if contract.ssh.jump_host:
        given.append(f"ProxyJump={contract.ssh.jump_host}")
    return [word for option in given for word in ("-o", option)]


def argv(contract: Contract, node: str, *command: str, batch: bool = True) -> list[str]:
    words = ["ssh", "-i", contract.ssh.key, *options(contract), "-o", "ConnectTimeout=5"]
    words += ["-o", "BatchMode=yes"] if batch else []
    return [*words, f"{contract.ssh.user}@{contract.nodes[node].management_address}", *command]
