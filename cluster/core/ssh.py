"""SSH to nodes: this deployment's key, the pinned host keys, and one way to run a command on many nodes at once."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster.core.config import layout
from cluster.core.contract import Contract

# A dead connection ends after 20 s.
ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")


def connection_options(known_hosts: str | Path, jump_host: str | None = None, *, accept_new: bool = False) -> list[str]:
    """The options of every connection. accept_new pins the key of a host that is not in known_hosts yet."""
    values = [f"UserKnownHostsFile={known_hosts}", "GlobalKnownHostsFile=/dev/null"]
    values += [f"StrictHostKeyChecking={'accept-new' if accept_new else 'yes'}", "IdentitiesOnly=yes"]
    values += [f"ProxyJump={jump_host}"] if jump_host else []
    return [word for value in values for word in ("-o", value)]


def options(contract: Contract) -> list[str]:
    """The options of a connection to a deployed node; Ansible uses them too."""
    found = connection_options(contract.login.known_hosts, contract.login.jump_host)
    return found if contract.login.port == 22 else [*found, "-o", f"Port={contract.login.port}"]


def argv(contract: Contract, node: str, *command: str, batch: bool = True) -> list[str]:
    words = ["ssh", *ALIVE, "-i", contract.login.key, *options(contract), "-o", "ConnectTimeout=5"]
    # Never a connection that somebody else opened: with its key gone it would still work.
    words += ["-o", "ControlPath=none"]
    words += ["-o", "BatchMode=yes"] if batch else []
    return [*words, f"{contract.login.user}@{contract.address(node)}", *command]


def bracketed(address: str) -> str:
    """For a path or a port behind it: an IPv6 address has colons of its own."""
    return f"[{address}]" if ":" in address else address


def as_training_account(contract: Contract, node: str, words: Sequence[str]) -> list[str]:
    """The same, as the account that training runs as. SUDO_COMMAND holds the whole command and would be handed on."""
    return argv(contract, node, f"sudo -u {layout()['user']} -H env -u SUDO_COMMAND " + shlex.join(words))


def gather(
    commands: Mapping[str, Sequence[str]], input: str | bytes | None = None, timeout: float = 60
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run one command per name, all at the same time, each with the same input.

    A command that exceeds the timeout is killed; its returncode is -1 and its stderr "timed out".
    """
    data = input.encode() if isinstance(input, str) else input or b""

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            done = subprocess.run(command, input=data, capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, -1, "", "timed out")
        out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(command, done.returncode, out, err)

    with ThreadPoolExecutor(max(len(commands), 1)) as pool:
        return dict(zip(commands, pool.map(run, commands.values()), strict=True))


def run_on_all(
    contract: Contract, nodes: Iterable[str], command: str, input: bytes | None = None, timeout: float = 60
) -> dict[str, subprocess.CompletedProcess[str]]:
    return gather({node: argv(contract, node, command) for node in nodes}, input, timeout)


def offline(contract: Contract, nodes: Iterable[str]) -> list[str]:
    """The nodes that do not answer."""
    answers = run_on_all(contract, nodes, "true", timeout=10)
    return [node for node, done in answers.items() if done.returncode]
