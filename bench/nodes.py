"""Talk to the nodes: copy the worker, start something on the head, ask who still answers."""

from __future__ import annotations

import hashlib
import io
import shlex
import subprocess
import tarfile
from pathlib import Path

from cluster import ssh as connection
from cluster.contract import Contract
from cluster.errors import InfraError

WORKER = Path(__file__).parent / "worker"


def ssh(contract: Contract, node: str, command: str) -> list[str]:
    argv = connection.argv(contract, node, command)
    return [argv[0], "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4", *argv[1:]]


def as_training_account(contract: Contract, node: str, words: list[str]) -> list[str]:
    """The same, by the account that training runs as. SUDO_COMMAND holds the whole command and would be handed on."""
    return ssh(contract, node, "sudo -u horovod -H env -u SUDO_COMMAND " + shlex.join(words))


def worker_archive() -> tuple[str, bytes]:
    """The worker's files as a tar, and a name made of their content."""
    files = [WORKER.parent / "__init__.py", *sorted(WORKER.glob("*.py"))]
    digest = hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:12]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in files:
            tar.add(path, arcname=str(path.relative_to(WORKER.parent.parent)), filter=_plain)
    return digest, buffer.getvalue()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    info.mode = 0o644
    return info


def install_worker(contract: Contract, nodes: list[str]) -> str:
    """Copy the worker to the nodes, all at once; return the folder of its files there."""
    digest, archive = worker_archive()
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
