"""The settings of a launch follow the fabric of its point, and name each node's own cards."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from bench.sweep import launch
from bench.worker import fabric
from cluster import fabric_settings, tuning
from cluster.core.contract import Fabric

JOB = launch.Launch("r1", "horovod-mpi", ("head", "w1"), 2, "10.9.1.0/24", "eth1")
CARDS = [("lo", "127.0.0.1"), ("eth0", "10.9.0.11"), ("eth10", "10.9.1.11"), ("eth1", "10.9.2.11")]
FAST = Fabric(interface="eth1", subnet="10.9.1.0/24", rate_gbps=100, transport="tcp", shaped=False)


def mca(job: launch.Launch) -> dict[str, str]:
    words = launch.argv(job)
    return {words[at + 1]: words[at + 2] for at, word in enumerate(words) if word == "-mca"}


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def rdma(classes: Path, device: str, name: str, number: int = 0) -> None:
    put(classes / f"infiniband/{device}/ports/1/link_layer", "Ethernet")
    put(classes / f"infiniband/{device}/device/net/{name}/dev_port", number)


def test_card_is_found_by_the_subnet_of_the_fabric():
    assert fabric.interface("10.9.1.0/24", CARDS) == "eth10"
    assert fabric.interface("10.9.2.0/24", CARDS) == "eth1"
    with pytest.raises(SystemExit, match=r"no interface has an address in 10\.9\.3\.0/24"):
        fabric.interface("10.9.3.0/24", CARDS)


def test_addresses_of_this_machine_are_read_from_the_kernel():
    found = fabric.addresses()
    assert ("lo", "127.0.0.1") in found
    assert {name for name, _ in found} <= {card.name for card in Path("/sys/class/net").iterdir()}


def test_launcher_names_the_fabric_and_the_node_names_its_card():
    given = {**replace(JOB, cuda=True, subnet="127.0.0.0/8").environment, "KEPT": "1"}
    assert given["NCCL_SOCKET_IFNAME"] == "=eth1"
    fabric.use(given)
    assert {given[name] for name in ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME")} == {"lo"}
    # Exact: eth1 alone would also match eth10.
    assert given["NCCL_SOCKET_IFNAME"] == "=lo"
    assert given["KEPT"] == "1"


def test_without_a_fabric_nothing_changes():
    given = {"GLOO_SOCKET_IFNAME": "eth7"}
    fabric.use(given)
    assert given == {"GLOO_SOCKET_IFNAME": "eth7"}
    assert fabric.of_launch(given) == ""


def test_adapters_of_a_card_are_found_also_below_a_bond_or_vlan(tmp_path):
    for name in ("eth1", "eth10", "eth2", "eth3", "bond0", "bond0.7"):
        (tmp_path / "net" / name).mkdir(parents=True)
    for upper, lower in (("bond0", "eth2"), ("bond0", "eth3"), ("bond0.7", "bond0")):
        (tmp_path / "net" / upper / f"lower_{lower}").mkdir()
    for number, name in enumerate(("eth1", "eth10", "eth2", "eth3")):
        rdma(tmp_path, f"mlx5_{number}", name)
    assert fabric.adapters("eth1", tmp_path) == ["mlx5_0:1"]
    assert fabric.adapters("bond0.7", tmp_path) == ["mlx5_2:1", "mlx5_3:1"]


def test_rdma_names_ports_exactly_and_does_not_fall_back():
    found = fabric.settings("verbs", "ib0", ["mlx5_0:1"])
    assert found["NCCL_IB_HCA"] == "=mlx5_0:1"
    # UCX would otherwise choose the fastest card, which may be on another fabric, or sockets.
    assert found["UCX_NET_DEVICES"] == "mlx5_0:1"
    with pytest.raises(SystemExit, match=rf"{socket.gethostname()}: eth1 has no RDMA adapter"):
        fabric.settings("verbs", "eth1", [])


@pytest.mark.parametrize(
    ("transport", "network", "off"), [("tcp", "Socket", "1"), ("verbs", "IB", "0"), ("efa", "AWS Libfabric", "1")]
)
def test_nccl_fails_instead_of_using_another_network(transport, network, off):
    found = replace(JOB, cuda=True, transport=transport).environment
    assert (found["NCCL_NET"], found["NCCL_IB_DISABLE"]) == (network, off)
    assert (found.get("FI_PROVIDER") == "efa") == (transport == "efa")
    assert "NCCL_NET" not in replace(JOB, transport=transport).environment


def test_mpi_uses_the_transport_of_the_point_whatever_the_files_say():
    tcp, verbs = mca(JOB), mca(replace(JOB, transport="verbs"))
    assert (tcp["pml"], tcp["osc"], tcp["btl"]) == ("ob1", "^ucx", "tcp,self,vader")
    assert (verbs["pml"], verbs["osc"], verbs["btl"]) == ("ucx", "ucx", "self,vader")
    assert tcp["btl_tcp_if_include"] == verbs["oob_tcp_if_include"] == "10.9.1.0/24"


def test_mpi_on_efa_uses_libfabric_or_only_starts_the_ranks_of_gpus():
    assert mca(replace(JOB, transport="efa"))["mtl_ofi_provider_include"] == "efa"
    assert mca(replace(JOB, transport="efa", cuda=True))["pml"] == "ob1"


def test_nccl_keeps_its_own_sockets_on_aws():
    chosen = tuning.choose({}, "10g", FAST, "aws")
    assert "NCCL_SOCKET_NTHREADS" not in fabric_settings.nccl("tcp", chosen)
    elsewhere = fabric_settings.nccl("tcp", tuning.choose({}, "10g", FAST, "baremetal"))
    assert (elsewhere["NCCL_SOCKET_NTHREADS"], elsewhere["NCCL_NSOCKS_PERTHREAD"]) == ("4", "4")
    # What `make tune` found on the cluster itself counts more.
    tuned = {"10g": tuning.Tuning(nccl_threads=2, nccl_sockets=8)}
    assert fabric_settings.nccl("tcp", tuning.choose(tuned, "10g", FAST, "aws"))["NCCL_NSOCKS_PERTHREAD"] == "8"
