"""pytest fixtures for the tests of every scenario (loaded as a plugin, see base.yml)."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import testinfra
from nodes import Scenario
from testinfra.backend.base import CommandResult
from testinfra.host import Host

from cluster.core.state import control_dir


class Nodes:
    """The scenario's nodes, by name: run commands on them, address them, restart them."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.names = [platform["name"] for platform in scenario.platforms]
        self.hosts: dict[str, Host] = {}
        control_dir(scenario.state.dir).mkdir(mode=0o700, exist_ok=True)

    def address(self, name: str, network: str = "fabric") -> str:
        return self.scenario.addresses(self.names.index(name))[network]

    def __getitem__(self, name: str) -> Host:
        if name not in self.hosts:
            self.hosts[name] = testinfra.get_host(
                f"ssh://ops@{self.address(name, 'management')}",
                ssh_identity_file=str(self.scenario.state.key),
                ssh_extra_args=f"-o UserKnownHostsFile={self.scenario.state.known_hosts} -o IdentitiesOnly=yes",
                controlpath=f"{control_dir(self.scenario.state.dir)}/test-%%C",
                sudo=True,
            )
        return self.hosts[name]

    def restart(self, name: str) -> None:
        self.scenario.restart(name)

    def apply(
        self, half: str, check: bool = False, without: str = "", **variables: object
    ) -> subprocess.CompletedProcess[str]:
        """Apply tasks/<half>.yml of the role again, or check with a diff what it would do; `without` a removed node."""
        base = Path(__file__).resolve().parent
        argv = [
            *(
                "ansible-playbook",
                "-i",
                base / "nodes.py",
                base / "converge.yml",
                *(["--check", "--diff"] if check else []),
            ),
            *("-e", json.dumps({"half": half, **variables})),
        ]
        env = self.scenario.state.environment() | {
            "WITHOUT": without,
            "ANSIBLE_FORCE_COLOR": "0",
            "ANSIBLE_NOCOLOR": "1",
        }
        return subprocess.run(argv, env=env, capture_output=True, text=True)

    @contextmanager
    def stranger(self, name: str, to: str) -> Iterator[None]:
        """Connect from one node to another with a fabric address that belongs to no node."""
        source = f"{self.address(name).rpartition('.')[0]}.200"
        self[name].check_output(f"ip address add {source}/24 dev fabric0")
        self[name].check_output(f"ip route add {self.address(to)}/32 dev fabric0 src {source}")
        try:
            yield
        finally:
            self[name].check_output(f"ip route del {self.address(to)}/32")
            self[name].check_output(f"ip address del {source}/24 dev fabric0")

    def as_user(self, name: str, command: str) -> CommandResult:
        """Run a command in a login session of the training account, with its limits. The exit code is 0 or 1."""
        return self.run(name, f"su -l horovod -c {shlex.quote(command)}")

    def run(self, name: str, command: str) -> CommandResult:
        """Run a command and map failures to 1: testinfra treats ssh's exit code 255 as a lost connection."""
        return self[name].run(f"{command} || exit 1")


@pytest.fixture(scope="session")
def scenario() -> Scenario:
    return Scenario.current()


@pytest.fixture(scope="session")
def nodes(scenario: Scenario) -> Nodes:
    return Nodes(scenario)


@pytest.fixture(scope="session")
def ssh(scenario: Scenario) -> Callable[..., list[str]]:
    """ssh command that trusts only the keys pinned when the nodes were created."""

    def argv(target: str, *options: str) -> list[str]:
        given = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-i", str(scenario.state.key)]
        pinned = ["-o", f"UserKnownHostsFile={scenario.state.known_hosts}", "-o", "GlobalKnownHostsFile=/dev/null"]
        return ["ssh", "-F", os.devnull, *options, *given, *pinned, "-o", "IdentitiesOnly=yes", target]

    return argv
