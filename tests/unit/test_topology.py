"""The topology of a node, read from a simulated /sys."""

from __future__ import annotations

import json

import pytest

from bench.comm import command as comm
from bench.worker import topology


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two NUMA nodes: a GPU on the first, a network card on the second."""
    for number in (0, 1):
        (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
    driver = tmp_path / "bus/pci/drivers/mlx5_core"
    driver.mkdir(parents=True)
    card = tmp_path / "bus/pci/devices/0000:81:00.0"
    gpu = tmp_path / "bus/pci/devices/0000:3b:00.0"
    for device, numa in ((card, 1), (gpu, 0)):
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")
    (card / "driver").symlink_to(driver)
    net = tmp_path / "class/net/eth1"
    net.mkdir(parents=True)
    (net / "device").symlink_to(card)
    for name, value in {"address": "02:00:00:00:00:01", "mtu": "9000", "speed": "100000"}.items():
        (net / name).write_text(f"{value}\n")
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (net / "dev_port").write_text("0\n")
    (port / "link_layer").write_text("Ethernet\n")
    (card / "net").mkdir()
    (card / "net/eth1").symlink_to(net)
    (port.parents[1] / "device").symlink_to(card)
    monkeypatch.setattr(topology, "SYS", tmp_path)
    answers = {"nvidia-smi": "00000000:3B:00.0, Tesla P100-PCIE-16GB"}
    monkeypatch.setattr(topology, "output", lambda *argv: answers.get(argv[0], ""))
    return tmp_path


def test_card_and_gpu_are_found_with_their_numa_nodes(machine, monkeypatch, capsys):
    monkeypatch.setattr(topology.sys, "argv", ["topology", "10.9.1.0/24"])
    monkeypatch.setattr(topology.fabric, "addresses", lambda: [("eth0", "10.9.0.11"), ("eth1", "10.9.1.11")])
    topology.main()
    found = json.loads(capsys.readouterr().out)
    assert found["numa_nodes"] == 2
    assert found["card"] == {
        **{"interface": "eth1", "mac": "02:00:00:00:00:01", "mtu": 9000, "driver": "mlx5_core"},
        **{"speed_mbit": 100000, "numa": 1, "adapters": ["mlx5_0:1"]},
    }
    assert found["gpus"] == [{"bus": "0000:3b:00.0", "name": "Tesla P100-PCIE-16GB", "numa": 0}]
    (line,) = comm.numa_warnings([found])
    assert "0000:3b:00.0" in line
    assert "eth1" in line


def test_hwloc_is_the_fallback_if_the_kernel_knows_no_numa_node(machine, monkeypatch):
    (machine / "class/net/eth1/device/numa_node").write_text("-1\n")
    monkeypatch.setattr(topology, "output", lambda *argv: "1" if argv[-1] == "os=eth1" else "")
    assert topology.card("eth1")["numa"] == 1


def test_virtual_card_has_its_link_kind_as_driver(machine, monkeypatch):
    (machine / "class/net/fabric0").mkdir()
    monkeypatch.setattr(
        topology, "output", lambda *argv: json.dumps([{"linkinfo": {"info_kind": "veth"}}]) if argv[0] == "ip" else ""
    )
    found = topology.card("fabric0")
    assert (found["driver"], found["numa"], found["speed_mbit"]) == ("veth", None, None)
    assert comm.numa_warnings([{"node": "w1", "card": found, "gpus": [{"bus": "x", "name": "y", "numa": 0}]}]) == []
