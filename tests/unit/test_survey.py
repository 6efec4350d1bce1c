"""What is decided from the answers of the nodes, and that Ansible and the wheelhouse use it."""

from __future__ import annotations

import json

import pytest
from test_gpu_generations import HASWELL, IVY_BRIDGE, machine

from cluster import image, survey
from cluster.core import config
from cluster.core.errors import UserError
from cluster.core.state import State


@pytest.fixture
def metal():
    """Two hosts with V100s."""
    return config.load("baremetal").model_copy(update={"nodes": 2})


def decide(cluster, **changes):
    names = [name for name, _ in cluster.planned().ordered()]
    found = [machine(name, *changes.get(name, {}).pop("gpus", ["1db4"]), **changes.get(name, {})) for name in names]
    return survey.decide(cluster, cluster.planned(), found)


def test_stack_and_lines_follow_from_the_gpus(metal):
    decided, lines = decide(metal)
    assert decided.stack == "12"
    assert lines == [
        f"{name}: 1 x Volta (10de:1db4): CUDA 12.6, driver 580 with the proprietary kernel module"
        for name in ("head", "w1")
    ]
    assert decide(metal, head={"gpus": ["20b0"]}, w1={"gpus": ["2330"]})[0].stack == "13"


def test_node_without_the_gpu_that_cluster_yml_declares_is_refused(metal):
    with pytest.raises(UserError, match=r"^w1: cluster\.yml declares GPUs, but there is no NVIDIA GPU on its PCI bus$"):
        decide(metal, w1={"gpus": []})


def test_obstacle_names_the_node(metal):
    with pytest.raises(UserError, match=r"^w1: Secure Boot is on"):
        decide(metal, w1={"secure_boot": "no"})


def test_gpus_that_cluster_yml_does_not_use_decide_nothing(metal):
    hosts = [host.model_copy(update={"gpus": 0}) for host in metal.baremetal.hosts]
    idle = metal.model_copy(update={"baremetal": metal.baremetal.model_copy(update={"hosts": hosts})})
    assert decide(idle, w1={"gpus": ["102d"], "secure_boot": "no"}) == (survey.Decision("13", ""), [])


def test_cuda_12_on_a_release_that_cannot_compile_horovod_needs_a_given_wheel(metal, monkeypatch):
    noble = metal.model_copy(update={"os_release": "noble"})
    facts = {name: {"system": "ubuntu", "release": "noble"} for name in ("head", "w1")}
    monkeypatch.delenv("HOROVOD_WHEEL", raising=False)
    with pytest.raises(
        UserError, match=r"^head: its GPUs need CUDA 12\.6, .*compiled on Debian 12; give HOROVOD_WHEEL="
    ):
        decide(noble, **facts)
    newer = {name: {**facts[name], "gpus": ["20b0"]} for name in facts}
    assert decide(noble, **newer)[0].stack == "13"
    monkeypatch.setenv("HOROVOD_WHEEL", "/some.whl")
    assert decide(noble, **facts)[0].stack == "12"


@pytest.mark.parametrize("facts", [{"release": "trixie"}, {"system": "ubuntu", "release": "noble"}])
def test_mix_of_releases_is_refused_in_one_line(metal, facts):
    with pytest.raises(UserError) as caught:
        decide(metal, w1=facts)
    system = facts.get("system", "debian")
    assert str(caught.value) == (
        f"w1: runs {system} {facts['release']}, but cluster.os_release is bookworm; all nodes must run the same release"
    )


def test_lowest_cpu_among_the_nodes_decides_and_is_named(metal):
    new, old = frozenset(HASWELL.split()), frozenset(IVY_BRIDGE.split())
    decided, lines = decide(metal, head={"cpu": new}, w1={"cpu": old})
    assert decided.arch_flags == "-march=x86-64-v2"
    assert lines[-1] == "w1: its CPU is the oldest; Horovod is compiled with -march=x86-64-v2 for all nodes"
    assert decide(metal, head={"cpu": new}, w1={"cpu": new})[1][-1].startswith("w1: 1 x Volta")


def test_ansible_and_the_key_of_the_nodes_follow_the_survey(metal, tmp_path, monkeypatch):
    state = State("try")
    monkeypatch.setattr(state, "dir", tmp_path)

    def variables(**decided):
        (tmp_path / "survey.json").write_text(json.dumps({"stack": "12", "arch_flags": "", **decided}))
        return image.node_variables(state, metal)

    first = variables()
    assert (first["cuda_stack"], first["locks"]["cuda"].rpartition("/")[2]) == ("12", "nodes-cuda12.lock")
    newer = variables(stack="13")
    assert (newer["cuda_stack"], newer["locks"]["nccl"].rpartition("/")[2]) == ("13", "nccl.lock")
    older = variables(arch_flags="-march=x86-64-v2")
    assert older["cpu_flags"] == "-march=x86-64-v2"
    assert len({one["node_key"] for one in (first, newer, older)}) == 3


def test_local_nodes_keep_the_fast_flags(tmp_path, monkeypatch):
    state = State("try")
    monkeypatch.setattr(state, "dir", tmp_path)
    (tmp_path / "survey.json").write_text('{"stack": "12", "arch_flags": "-march=x86-64"}')
    local = config.load("local")
    assert survey.run(state, local, local.planned()) == []
    assert image.node_variables(state, local)["cpu_flags"] == ""
