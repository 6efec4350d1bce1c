"""The interface that sent the bytes: counters of the kernel and of RDMA, and the log of NCCL."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_sweep import point_of, report

from bench.sweep import nccl_log, record
from bench.worker import counters


def put(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def card(classes: Path, name: str, layer: str, words: int, interfaces: dict[str, int], port: int = 1) -> None:
    """An RDMA port as the kernel shows it; interfaces: name -> dev_port."""
    device = classes / "infiniband" / name
    put(device / f"ports/{port}/counters/port_xmit_data", words)
    put(device / f"ports/{port}/link_layer", layer)
    for interface, number in interfaces.items():
        put(device / f"device/net/{interface}/dev_port", number)


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    for name, sent in {"lo": 5, "eth0": 100, "ib0": 40, "ib1": 50, "ifb0": 9}.items():
        put(tmp_path / f"net/{name}/statistics/tx_bytes", sent)
    return tmp_path


def test_without_rdma_each_interface_has_its_own_count(classes):
    assert counters.sent_bytes(classes) == {"eth0": 100, "ib0": 40, "ib1": 50}


def test_infiniband_port_replaces_the_count_of_its_interface(classes):
    card(classes, "mlx5_0", "InfiniBand", 1000, {"ib0": 0})
    assert counters.sent_bytes(classes) == {"eth0": 100, "ib0": 4000, "ib1": 50}


def test_rdma_over_ethernet_is_added_to_the_count_of_the_interface(classes):
    card(classes, "mlx5_0", "Ethernet", 1000, {"eth0": 3})
    assert counters.sent_bytes(classes)["eth0"] == 4100


def test_ports_of_one_card_are_counted_separately(classes):
    for port, words in ((1, 10), (2, 20)):
        card(classes, "mlx4_0", "InfiniBand", words, {"ib0": 0, "ib1": 1}, port)
    assert counters.sent_bytes(classes) == {"eth0": 100, "ib0": 40, "ib1": 80}


def test_port_without_interface_is_counted_under_its_own_name(classes):
    card(classes, "mlx5_9", "InfiniBand", 7, {})
    assert counters.sent_bytes(classes)["mlx5_9/1"] == 28


def test_efa_is_counted_by_its_own_counter(classes):
    put(classes / "infiniband/rdmap0s6/ports/1/hw_counters/tx_bytes", 7)
    assert counters.sent_bytes(classes) == {"eth0": 100, "ib0": 40, "ib1": 50, "efa:rdmap0s6": 7}


def test_parts_are_the_interfaces_below_and_the_interface_of_a_port(classes):
    for upper, lower in (("bond0", "eth0"), ("bond0", "eth1"), ("bond0.7", "bond0")):
        (classes / "net" / upper / f"lower_{lower}").mkdir(parents=True)
    card(classes, "mlx5_0", "InfiniBand", 1000, {"ib0": 0})
    assert counters.parts(classes) == {"bond0": ["eth0", "eth1"], "bond0.7": ["bond0"], "mlx5_0:1": ["ib0"]}


def parsed(transport: str, interface: str, *lines: str, subnet: str = "10.9.1.0/24") -> nccl_log.Log:
    log = nccl_log.Log(transport, interface, subnet)
    for line in lines:
        log.read(line + "\n")
    return log


IB = [
    "head:11:12 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB ; OOB ib0:10.9.1.10<0>",
    "head:11:12 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA",
    "[1]<stdout>:w1:21:22 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/IB/0",
]
SOCKET = [
    "head:11:12 [0] NCCL INFO NET/Socket : Using [0]eth0:10.9.0.10<0> [1]eth1:10.9.2.10<0>",
    "head:11:12 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
]


def test_nccl_over_infiniband_is_no_problem():
    log = parsed("verbs", "ib0", *IB)
    assert log.networks == ["IB"]
    assert log.problem() is None


def test_nccl_fallback_to_sockets_is_reported_with_the_host():
    log = parsed("verbs", "ib0", IB[2], *SOCKET)
    assert log.networks == ["IB", "Socket"]
    assert "on head" in log.problem()


def test_nccl_on_another_interface_is_reported():
    assert "eth0, eth1 on head, not over fabric0" in parsed("tcp", "fabric0", *SOCKET).problem()
    # The card of the fabric is found by its address: its name is another one on another node.
    assert parsed("tcp", "fabric0", *SOCKET, subnet="10.9.2.0/24").problem() is None
    assert parsed("tcp", "eth1", *SOCKET).problem() is not None


@pytest.mark.parametrize(("lines", "status"), [(IB, "ok"), (SOCKET, "failed")])
def test_trial_fails_if_nccl_uses_another_network(lines, status):
    _, main = report(["head", "w1"])
    port = {"mlx5_0:1": ["fabric0"]}
    main = replace(main, ranks=[replace(rank, parts=port) for rank in main.ranks])
    point = point_of().model_copy(update={"device": "cuda", "transport": "verbs"})
    trial = record.trial(point, main, None, None, "fabric0", 1.0, "now", None, parsed("verbs", "fabric0", *lines))
    assert trial.status == status
    assert trial.traffic.nccl == (["IB"] if status == "ok" else ["Socket"])
