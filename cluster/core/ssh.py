"""SSH to nodes: this deployment's key, the pinned host keys, and one way to run a command on many nodes at once."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from cluster.core.contract import Contract

# A dead connection ends after 20 s.
ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")


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
    words = ["ssh", *ALIVE, "-i", contract.ssh.key, *options(contract), "-o", "ConnectTimeout=5"]
    words += ["-o", "BatchMode=yes"] if batch else []
    return [*words, f"{contract.ssh.user}@{contract.nodes[node].management_address}", *command]


def as_training_account(contract: Contract, node: str, words: Sequence[str]) -> list[str]:
    """The same, as the account that training runs as. SUDO_COMMAND holds the whole command and would be handed on."""
    return argv(contract, node, "sudo -u horovod -H env -u SUDO_COMMAND " + shlex.join(words))


def gather(
    commands: Mapping[str, Sequence[str]], input: bytes | None = None, timeout: float = 60
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run all commands at once. One that does not end in time has the return code -1 and says so in stderr."""

    def run(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run(list(words), input=input or b"", capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(list(words), -1, "", f"no answer within {timeout:g} s")
        texts = (part.decode(errors="replace") for part in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(done.args, done.returncode, *texts)

    with ThreadPoolExecutor(max(1, len(commands))) as pool:
        return dict(zip(commands, pool.map(run, commands.values()), strict=True))


def run_on_all(
    contract: Contract, nodes: Iterable[str], command: str, input: bytes | None = None, timeout: float = 60
) -> dict[str, subprocess.CompletedProcess[str]]:
    return gather({node: argv(contract, node, command) for node in nodes}, input, timeout)


def offline(contract: Contract, nodes: Iterable[str]) -> list[str]:
    """The nodes that do not answer."""
    answers = run_on_all(contract, nodes, "true", timeout=10)
    return [node for node, done in answers.items() if done.returncode]
