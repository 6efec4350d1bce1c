"""The baremetal provider without hosts: its section of cluster.yml, and the checks of what hosts answer."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.core import config
from cluster.core.errors import InfraError, UserError
from cluster.core.state import State
from cluster.providers.baremetal import peers
from cluster.providers.baremetal.provider import Baremetal

GOOD = yaml.safe_load(config.cluster_file("baremetal").read_text())["cluster"]
ANSWER = {
    "name": "node0",
    "os": "debian",
    "release": "bookworm",
    "root": True,
    "sudo": True,
    "python": True,
    "guarded": False,
    "addresses": ["lo 127.0.0.1/8", "eth1 10.10.0.10/24"],
    "client": "192.168.1.2",
    "speeds": {"eth1": 10000},
}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config, "ROOT", tmp_path)
    path = tmp_path / "inventories/try/group_vars/all/cluster.yml"
    path.parent.mkdir(parents=True)

    def loaded(metal: dict | None = None, host: dict | None = None, **changes: object) -> config.Cluster:
        section = {**GOOD["baremetal"], **(metal or {})}
        section["hosts"] = [{**section["hosts"][0], **(host or {})}, *section["hosts"][1:]]
        path.write_text(yaml.safe_dump({"cluster": {**GOOD, **changes, "baremetal": section}}))
        return config.load("try")

    return loaded


def test_shipped_file_is_valid(load):
    assert [host.name for host in load().baremetal.hosts] == ["node0", "node1"]


@pytest.mark.parametrize(
    ("metal", "host", "changes", "message"),
    [
        ({}, {}, {"nodes": 3}, "nodes: 3, but baremetal.hosts has 2; add hosts"),
        ({}, {"address": "node0.example"}, {}, "cluster.baremetal.hosts.0.address"),
        ({}, {"name": "node1"}, {}, "two hosts have the same name"),
        ({}, {"fabric_addresses": {}}, {}, "node0 needs an address on each of 10g"),
        ({}, {"fabric_addresses": {"10g": "10.11.0.10"}}, {}, "10.11.0.10 is not in the subnet of 10g"),
        ({}, {"host_key": "ssh-rsa AAAA"}, {}, "cluster.baremetal.hosts.0.host_key"),
        ({"networks": {}}, {}, {}, "needs an address on each of"),
        ({}, {}, {"fabrics": {"1g": {"rate_gbps": 1}}, "active_fabric": "1g"}, "baremetal.networks"),
        ({"user": "Not Good"}, {}, {}, "cluster.baremetal.user"),
    ],
)
def test_wrong_field_is_named_in_one_line(load, metal, host, changes, message):
    with pytest.raises(UserError) as caught:
        load(metal, host, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def check(cluster: config.Cluster, code: int = 0, err: str = "", **changes: object) -> dict[str, str]:
    provider = Baremetal(State("try"), cluster)
    answer = subprocess.CompletedProcess([], code, json.dumps({**ANSWER, **changes}), err)
    return provider.check_host(provider.hosts[0], answer)


def test_host_that_matches_is_accepted_with_the_interface_that_has_its_address(load):
    assert check(load()) == {"10g": "eth1"}
    assert check(load(), addresses=["enp65s0 10.10.0.10/24"]) == {"10g": "enp65s0"}


def test_interface_given_in_cluster_yml_must_have_the_address(load):
    metal = {"networks": {"10g": {"subnet": "10.10.0.0/24", "interface": "eth1"}}}
    assert check(load(metal)) == {"10g": "eth1"}
    with pytest.raises(UserError, match="eth1 does not have the address"):
        check(load(metal), addresses=["eth0 10.10.0.10/24"])


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ({"os": "ubuntu", "release": "jammy"}, UserError, "runs ubuntu jammy"),
        ({"release": "trixie"}, UserError, "runs debian trixie"),
        ({"root": False}, UserError, "sudo without a password"),
        ({"root": False, "sudo": False}, UserError, "sudo is missing; run `apt-get install sudo` there"),
        ({"python": False}, UserError, "python3 is missing"),
        ({"name": "node7"}, UserError, "its hostname is node7"),
        (
            {"client": "192.168.2.7"},
            UserError,
            "it sees this machine as 192.168.2.7, which is not in cluster.admin_cidrs",
        ),
        ({"client": "fd00::7"}, UserError, "it sees this machine as fd00::7"),
        ({"addresses": ["eth0 10.10.0.9/24"]}, UserError, "no interface has the address 10.10.0.10"),
        ({"code": 255, "err": "ops@x: Permission denied (publickey)."}, UserError, "cannot log in"),
        ({"code": 255, "err": "Host key verification failed."}, UserError, "its host key is not the pinned one"),
        ({"code": 255, "err": "ssh: connect to host: No route to host"}, InfraError, "No route to host"),
    ],
)
def test_host_that_does_not_match_is_named(load, answer, error, message):
    with pytest.raises(error) as caught:
        check(load(), **answer)
    assert "host node0 (192.168.1.10)" in str(caught.value)
    assert message in str(caught.value)


def test_host_key_in_cluster_yml_overrides_the_adopted_one(load):
    cluster = load(host={"host_key": "ssh-ed25519 AAAAgiven by hand"})
    provider = Baremetal(State("try"), cluster)
    provider.pinned_keys_file.write_text("192.168.1.10 ssh-ed25519 AAAAadopted\n192.168.1.11 ssh-ed25519 AAAAother\n")
    assert provider.pinned_keys() == {"node0": "ssh-ed25519 AAAAgiven", "node1": "ssh-ed25519 AAAAother"}


@pytest.mark.parametrize("client", ["", "192.168.1.99", "::ffff:192.168.1.99", "10.10.0.11", "10.10.0.10", "127.0.0.1"])
def test_login_that_the_firewall_will_accept_is_accepted(load, client):
    """From an admin network, also as a mapped address, from another host over the fabric, and from the host itself."""
    assert check(load(), client=client) == {"10g": "eth1"}


def test_login_over_ipv6_needs_an_ipv6_network(load):
    cluster = load(admin_cidrs=["fd00:5::/64"])
    assert check(cluster, client="fd00:5::7%eth0") == {"10g": "eth1"}
    with pytest.raises(UserError, match=r"sees this machine as 192\.168\.1\.2"):
        check(cluster)


def test_host_that_nodes_leaves_out_later_is_still_one_to_release(load, tmp_path):
    cluster = load(host={"host_key": "ssh-ed25519 AAAAfirst"})
    state = State("try")
    state.known_hosts = tmp_path / "known_hosts"
    provider = Baremetal(state, cluster)
    assert provider.hosts_in_use() == []
    provider.pinned_keys_file.write_text("192.168.1.11 ssh-ed25519 AAAAsecond\n")
    provider.pin({"node0", "node1"})
    smaller = Baremetal(state, cluster.model_copy(update={"nodes": 1}))
    smaller.pin({*smaller.hosts_in_use(), *(host.name for host in smaller.hosts)})
    assert smaller.hosts_in_use() == ["node0", "node1"]
    assert state.known_hosts.read_text() == "192.168.1.10 ssh-ed25519 AAAAfirst\n192.168.1.11 ssh-ed25519 AAAAsecond\n"


def test_host_whose_packets_another_firewall_drops_is_named(load, monkeypatch):
    asked, lost = {}, {"node1": "10.10.0.10"}

    def run(self, commands, script):
        asked.update({name: words.split()[5:] for name, (_, words) in commands.items()})
        return {name: subprocess.CompletedProcess([], 0, f"{lost.get(name, '')}\n", "") for name in commands}

    monkeypatch.setattr(Baremetal, "run", run)
    provider = Baremetal(State("try"), load())
    with pytest.raises(UserError) as caught:
        peers.check(provider, set())
    assert "host node1: it does not reach node0 on fabric 10g (10.10.0.10): a firewall there" in str(caught.value)
    assert asked == {"node0": ["10.10.0.11"], "node1": ["10.10.0.10"]}
    # Ours does not know a new host yet.
    lost.clear()
    peers.check(provider, {"node0"})
    assert asked == {"node0": ["10.10.0.11"], "node1": []}


def test_connection_that_is_refused_counts_as_reached_and_one_that_is_dropped_as_lost():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        # The first is open, the second refuses, and nothing can connect to the third.
        argv = [sys.executable, "-I", "-c", peers.CONNECT, port, "2", "127.0.0.1", "127.0.0.2", "224.0.0.1"]
        assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "224.0.0.1\n"
