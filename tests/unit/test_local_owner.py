"""Containers and networks belong to a state folder: nobody else removes them, and nobody else gets their name."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standins import podman

from cluster.core import lock

TOOL = "cluster.providers.local.node"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without containers. It acts as root, because sudo would not find the stand-in."""
    for name, value in podman.install(tmp_path / "machine").items():
        monkeypatch.setenv(name, value)
    return tmp_path / "machine"


@pytest.fixture
def ssh_port() -> Iterator[int]:
    """A server on loopback that greets as sshd does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                client.sendall(b"SSH-2.0-standin\r\n")
                client.close()

        threading.Thread(target=greet, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def tool(action: str, **spec: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "INPUT": json.dumps(spec)}
    return subprocess.run([sys.executable, "-m", TOOL, action], env=env, capture_output=True, text=True, timeout=60)


def make_state(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "id_ed25519.pub").write_text("ssh-ed25519 AAAA us\n")
    return folder


def node(state: Path, port: int, **changes: Any) -> dict[str, Any]:
    addresses = {"management": "127.0.0.1", "fabric": "10.77.1.10"}
    known = {"cluster": "local", "name": "head", "addresses": addresses, "ssh_port": port, "image": "node"}
    return {**known, "state_dir": str(state), "fuse": True, **changes}


def networks(state: Path) -> list[dict[str, Any]]:
    both = {"management": "10.77.0.0/24", "fabric": "10.77.1.0/24"}
    return [
        {"cluster": "local", "name": f"local-{name}", "subnet": subnet, "internal": name == "fabric"}
        | {"state_dir": str(state)}
        for name, subnet in both.items()
    ]


def boot(state: Path, port: int, **changes: Any) -> None:
    for network in networks(state):
        done = tool("create-network", **network)
        assert done.returncode == 0, done.stderr
    done = tool("create-node", **node(state, port, **changes))
    assert done.returncode == 0, done.stderr


def test_cluster_of_the_same_name_removes_no_node_of_another_state_folder(
    machine: Path, ssh_port: int, tmp_path: Path
) -> None:
    mine, other = make_state(tmp_path / "a/.state/local"), make_state(tmp_path / "a/.state/x")
    boot(mine, ssh_port)
    before = podman.read(machine)
    for action, spec in (
        ("remove-leftovers", {"cluster": "local", "state_dir": str(other)}),
        ("destroy-node", node(other, ssh_port)),
        *(("destroy-network", network) for network in networks(other)),
    ):
        assert tool(action, **spec).returncode == 0
    assert podman.read(machine) == before
    for action, spec in (("create-network", networks(other)[0]), ("create-node", node(other, ssh_port))):
        done = tool(action, **spec)
        assert done.returncode == 1
        assert f"belongs to {mine}" in done.stderr
        assert json.loads((other / "failure.json").read_text())["text"] == done.stderr.strip()
    assert podman.read(machine) == before


def test_owner_removes_its_nodes_and_networks_and_nothing_else(machine: Path, ssh_port: int, tmp_path: Path) -> None:
    state = make_state(tmp_path / "a/.state/local")
    boot(state, ssh_port)
    # Somebody's container from the same image inherits the builder's labels.
    inherited = {"horovod-cluster": "local", "horovod-cluster-state": str(state)}
    podman.add_container(machine, "laughing_diffie", inherited, None)
    podman.add_network(machine, "podman", "10.88.0.0/16")
    assert tool("remove-leftovers", cluster="local", state_dir=str(state)).returncode == 0
    left = podman.read(machine)
    assert list(left["containers"]) == ["laughing_diffie"]
    assert list(left["networks"]) == ["podman"]


def test_nodes_of_an_earlier_version_belong_to_the_folder_of_their_seed(
    machine: Path, ssh_port: int, tmp_path: Path
) -> None:
    mine, other = make_state(tmp_path / "a/.state/local"), make_state(tmp_path / "b/.state/local")
    label = {"horovod-cluster": "local"}
    podman.add_network(machine, "local-management", "10.77.0.0/24", label)
    podman.add_container(machine, "local-head", label, mine / "seeds/head", networks=["local-management"])
    assert tool("remove-leftovers", cluster="local", state_dir=str(other)).returncode == 0
    assert tool("destroy-node", **node(other, ssh_port)).returncode == 0
    assert list(podman.read(machine)["containers"]) == ["local-head"]
    assert tool("destroy-node", **node(mine, ssh_port)).returncode == 0
    # Terraform's state of an earlier version names no state folder for a network.
    old = {"cluster": "local", "name": "local-management", "subnet": "10.77.0.0/24", "internal": False}
    assert tool("destroy-network", **old).returncode == 0
    left = podman.read(machine)
    assert (left["containers"], left["networks"]) == ({}, {})


def test_network_is_not_removed_while_a_container_is_in_it(machine: Path, ssh_port: int, tmp_path: Path) -> None:
    state = make_state(tmp_path / "a/.state/local")
    boot(state, ssh_port)
    podman.add_container(machine, "guest", {}, None, networks=["local-fabric"])
    done = tool("remove-leftovers", cluster="local", state_dir=str(state))
    assert done.returncode == 1
    assert "local-fabric" in done.stderr
    assert list(podman.read(machine)["containers"]) == ["guest"]


def test_node_that_terraform_lost_is_kept_if_it_is_what_we_want(machine: Path, ssh_port: int, tmp_path: Path) -> None:
    state = make_state(tmp_path / "a/.state/local")
    boot(state, ssh_port)
    before = podman.read(machine)
    key = (state / "known_hosts").read_text()
    (state / "known_hosts").unlink()
    boot(state, ssh_port)
    assert podman.read(machine) == before
    assert (state / "known_hosts").read_text() == key
    # One that never answered holds no data.
    (state / "seeds/head/created").unlink()
    boot(state, ssh_port)
    assert (state / "known_hosts").read_text() != key


def test_killed_build_of_an_image_does_not_stop_the_builds_of_others(
    machine: Path, ssh_port: int, tmp_path: Path
) -> None:
    """It left its network, or also its builder; the error was podman's: subnet 10.76.255.0/24 is already used."""
    killed, mine = make_state(tmp_path / "a/.state/x"), make_state(tmp_path / "b/.state/local")
    subnet = "10.76.255.0/24"
    theirs = {"cluster": "x-build", "name": "x-build-management", "subnet": subnet, "internal": False}
    ours = {**theirs, "cluster": "local-build", "name": "local-build-management", "state_dir": str(mine)}
    podman.add_network(machine, "local-management", "10.77.0.0/24", {"horovod-cluster": "local"})
    for owner, builder in ({}, False), ({"state_dir": str(killed)}, True):
        assert tool("create-network", **theirs, **owner).returncode == 0
        if builder:
            spec = node(killed, ssh_port, cluster="x-build", name="builder", addresses={"management": "127.0.0.1"})
            assert tool("create-node", **spec).returncode == 0
        with lock.environment(killed.with_name("x.lock"), "x"):
            done = tool("remove-dead-build", **ours)
        if builder:
            assert done.returncode == 1 and f"builds an image in it, for {killed}" in done.stderr
            assert tool("remove-dead-build", **ours).returncode == 0
        left = podman.read(machine)
        assert (left["containers"], list(left["networks"])) == ({}, ["local-management"])
