"""Talk to the nodes: copy the worker, start something on the head, ask who still answers."""

from __future__ import annotations

import shlex
import subprocess

from cluster.core import ssh as connection
from cluster.core import worker_files
from cluster.core.contract import Contract
from cluster.core.errors import InfraError


def ssh(contract: Contract, node: str, command: str) -> list[str]:
    argv = connection.argv(contract, node, command)
    return [argv[0], "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4", *argv[1:]]


def as_training_account(contract: Contract, node: str, words: list[str]) -> list[str]:
    """The same, by the account that training runs as. SUDO_COMMAND holds the whole command and would be handed on."""
    return ssh(contract, node, "sudo -u horovod -H env -u SUDO_COMMAND " + shlex.join(words))


def install_worker(contract: Contract, nodes: list[str]) -> str:
    """Copy the worker to the nodes, all at once; return the folder of its files there."""
    digest, archive = worker_files.archive()
    folder = f"/opt/bench-worker/{digest}"
    command = f"sudo mkdir -p {folder} && sudo tar -x -C {folder}"
    running = {
        node: subprocess.Popen(
            ssh(contract, node, command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for node in nodes
    }
    for node, process in running.items():
        try:
            _, problem = process.communicate(archive, timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise InfraError(f"node {node} does not answer; run `make doctor`") from None
        if process.returncode:
            raise InfraError(f"node {node}: cannot copy the worker: {problem.decode().strip()}; run `make doctor`")
    return f"{folder}/bench/worker"


def restore_rates(contract: Contract, nodes: list[str]) -> None:
    """Give the fabric its own rate back; a node that does not answer gets it at boot or by the next deploy."""
    command = "sudo /usr/local/sbin/fabric-rate reset"
    running = [
        subprocess.Popen(
            ssh(contract, node, command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for node in nodes
    ]
    for process in running:
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()


def silent(contract: Contract, nodes: list[str]) -> list[str]:
    """Which of the nodes do not answer."""
    running = {
        node: subprocess.Popen(
            ssh(contract, node, "true"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in nodes
    }
    missing = []
    for node, process in running.items():
        try:
            ok = process.wait(timeout=10) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            ok = False
        if not ok:
            missing.append(node)
    return missing
