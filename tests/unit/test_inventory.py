"""Terraform's output to Ansible's inventory, and what happens when the output is not the contract."""

import copy
import importlib.util

import pytest

from cluster.core import config, contract
from cluster.core.config import ROOT
from cluster.core.errors import InfraError
from cluster.core.state import State

spec = importlib.util.spec_from_file_location("inventory", ROOT / "inventories/terraform.py")
inventory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(inventory)


def node(index: int, role: str) -> dict:
    return {
        "index": index,
        "role": role,
        "management_address": f"10.9.0.{10 + index}",
        "fabric_addresses": {"1g": f"10.9.1.{10 + index}"},
        "gpus": 0,
        "gpu_model": "none",
    }


OUTPUT = {
    "name": "try",
    "provider": "local",
    "ssh": {"user": "ops", "key": "/k", "known_hosts": "/h", "jump_host": None},
    "nodes": {"head": node(0, "head"), **{f"w{i}": node(i, "worker") for i in range(1, 12)}},
    "fabrics": {
        "1g": {"interface": "fabric0", "subnet": "10.9.1.0/24", "rate_gbps": 1, "transport": "tcp", "shaped": True}
    },
    "active_fabric": "1g",
    "storage": {"backend": "none", "server": "head", "path": "/shared"},
}


def test_hosts_come_in_the_order_of_their_numbers():
    hosts = inventory.inventory(contract.parse(OUTPUT), State("local"), config.load("local"))["cluster"]["hosts"]
    assert hosts == ["head", *(f"w{i}" for i in range(1, 12))]


def test_groups_and_strict_host_keys():
    made = inventory.inventory(contract.parse(OUTPUT), State("local"), config.load("local"))
    assert made["head"]["hosts"] == ["head"]
    assert "head" not in made["workers"]["hosts"]
    assert "StrictHostKeyChecking=yes" in made["cluster"]["vars"]["ansible_ssh_common_args"]


def test_interface_of_a_node_wins_over_the_fabrics():
    other = {**node(1, "worker"), "interfaces": {"1g": "enp65s0"}}
    found = contract.parse({**OUTPUT, "nodes": {"head": node(0, "head"), "w1": other}})
    assert (found.interface("head"), found.interface("w1"), found.interface("w1", "1g")) == (
        *("fabric0", "enp65s0", "enp65s0"),
    )
    hosts = inventory.inventory(found, State("local"), config.load("local"))["_meta"]["hostvars"]
    assert [hosts[name]["node_interfaces"] for name in ("head", "w1")] == [{"1g": "fabric0"}, {"1g": "enp65s0"}]


def test_group_knows_the_completed_file_and_the_names_of_a_nodes_parts(monkeypatch):
    def variables() -> dict:
        return inventory.inventory(contract.parse(OUTPUT), State("local"), config.load("local"))["cluster"]["vars"]

    assert variables()["cluster_file"] == str(ROOT / ".state/local/cluster.yml")
    monkeypatch.setenv("CLUSTER_FILE", "/planned.yml")
    assert variables()["cluster_file"] == "/planned.yml"
    assert variables()["layout"] == dict(config.layout())
    assert variables()["versions"] == config.versions()


@pytest.mark.parametrize("transport", ["tcp", "verbs", "efa"])
def test_contract_takes_every_transport(transport):
    fabric = {**OUTPUT["fabrics"]["1g"], "transport": transport}
    assert contract.parse({**OUTPUT, "fabrics": {"1g": fabric}}).fabrics["1g"].transport == transport


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (["fabrics", "1g", "transport"], "rdma", "cluster.fabrics.1g.transport"),
        (["fabrics", "1g", "rate_gbps"], "fast", "cluster.fabrics.1g.rate_gbps"),
        (["nodes", "w1", "role"], "king", "cluster.nodes.w1.role"),
        (["ssh"], None, "cluster.ssh"),
        (["nodes", "w1", "role"], "head", "one head"),
    ],
)
def test_wrong_output_is_named(path, value, named):
    broken = copy.deepcopy(OUTPUT)
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InfraError, match=named):
        contract.parse(broken)
