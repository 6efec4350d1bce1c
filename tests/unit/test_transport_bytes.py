"""The bytes that a node must send for an algorithm and topology, and whose counters show them."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_sweep import point_of, report

from bench.sweep import nccl_log, transport
from bench.worker import counters
from bench.worker.protocol import TrialDone
from cluster import tuning

LOGS = Path(__file__).parents[1] / "fixtures/nccl"


@pytest.mark.parametrize(
    ("algorithm", "nodes", "gpus", "expected"),
    [
        ("ring", 4, 1, 2 * 3 / 4),
        ("ring", 2, 8, 2 * 15 / 16),
        ("tree", 2, 8, 1.0),
        ("tree", 4, 4, 2 * 3 / 4),
        ("parameter_server", 2, 4, 4.0),
        ("all_gather", 2, 4, 7.0),
        ("recursive_doubling", 2, 1, 1.0),
        # Each of four ranks per node sends everything to its partner on the other node.
        ("recursive_doubling", 2, 4, 4.0),
        # Halving adds up inside the node first where ranks are a power of two.
        ("rabenseifner", 2, 4, 1.0),
        ("rabenseifner", 4, 4, 2 * 3 / 4),
        # Three ranks: one pair exchanges halves, and one of them then works with the third.
        ("rabenseifner", 3, 1, (2.5 + 2.0) / 3),
    ],
)
def test_bytes_that_leave_a_node_follow_from_algorithm_and_topology(algorithm, nodes, gpus, expected):
    assert transport.share(algorithm, nodes, gpus) == pytest.approx(expected)


def test_every_engine_has_its_algorithm():
    point = point_of(2).model_copy(update={"gpus_per_node": 4})

    def how(settings=tuning.UNTUNED, **changes):
        return transport.algorithm(point.model_copy(update=changes), settings)

    assert {how(engine="horovod-gloo"), how(engine="ddp"), how(engine="horovod-mpi", device="cuda")} == {"ring"}
    assert how(engine="ps") == "parameter_server"
    assert how(engine="horovod-mpi") == "rabenseifner"
    assert how(engine="horovod-mpi", gpus_per_node=1) == "recursive_doubling"
    assert how(tuning.Tuning(), engine="horovod-mpi") == "ring"
    assert how(engine="ddp", compression="1bit") == "all_gather"


def counted(sent: dict[str, float], parts: dict[str, list[str]], kind="tcp", fabric="fabric0", log=None):
    """Error of a trial in which both nodes sent these shares of the expected bytes."""
    point, main = report(["head", "w1"])
    point = point.model_copy(update={"transport": kind})
    expected = next(iter(main.ranks[0].sent.values()))
    each = {nic: part * expected for nic, part in sent.items()}
    main = replace(main, ranks=[replace(rank, sent=each, parts=parts) for rank in main.ranks])
    assert isinstance(main, TrialDone)
    return transport.proof(point, main, None, fabric, "ring", log)[1]


BOND = {"bond0": ["eth0", "eth1"], "bond0.7": ["bond0"], "br0": ["bond0.7"]}
TWICE = {"eth0": 0.6, "eth1": 0.4, "bond0": 1.0, "bond0.7": 1.0, "br0": 1.0}


@pytest.mark.parametrize("fabric", ["bond0", "bond0.7", "br0"])
def test_bond_vlan_and_bridge_are_counted_once(fabric):
    sent = {name: part for name, part in TWICE.items() if name in counters.below({fabric}, BOND)}
    assert counted(sent, BOND, fabric=fabric) is None


def test_each_node_counts_its_own_card_of_the_fabric():
    point, main = report(["head", "w1"])
    expected = next(iter(main.ranks[0].sent.values()))
    cards = {"head": "ens1", "w1": "ens2"}

    def error(sent: str) -> str | None:
        """Of a trial in which w1 sent over this card; ens1 is the other network there."""
        found = {"head": {"ens1": expected, "ens2": 0.0}, "w1": {"ens1": 0.0, "ens2": 0.0, sent: expected}}
        ranks = [replace(rank, sent=found[rank.node], interface=cards[rank.node]) for rank in main.ranks]
        return transport.proof(point, replace(main, ranks=ranks), None, "ens1")[1]

    assert error("ens2") is None
    assert "ens1 on w1" in error("ens1")


def test_vlan_beside_the_fabrics_vlan_fails_the_proof():
    sent = {"eth0": 1.0, "eth0.7": 0.0, "eth0.8": 1.0}
    parts = {"eth0.7": ["eth0"], "eth0.8": ["eth0"]}
    assert "eth0.8 on head" in counted(sent, parts, fabric="eth0.7")


def test_rdma_over_a_bond_is_counted_by_its_cards():
    assert counted({"eth0": 0.5, "eth1": 0.5, "bond0": 0.0}, BOND, "verbs", "bond0") is None
    assert counted({"eth0": 0.2, "eth1": 0.2, "bond0": 1.0}, BOND, "verbs", "bond0") is not None


def test_efa_is_proved_by_its_own_counters():
    assert counted({"efa:rdmap0s6": 0.5, "efa:rdmap1s6": 0.5, "ens5": 0.01}, {}, "efa", "ens5") is None
    assert "ens5" in counted({"efa:rdmap0s6": 0.0, "ens5": 1.0}, {}, "efa", "ens5")


def read(name: str, transport: str, interface: str, subnet: str = "10.9.1.0/24") -> nccl_log.Log:
    log = nccl_log.Log(transport, interface, subnet)
    for line in (LOGS / name).read_text().splitlines(keepends=True):
        log.read(line)
    return log


def test_log_of_a_ring_over_one_socket_interface():
    log = read("ring.log", "tcp", "eth1")
    assert log.problem() is None
    assert log.shares("unknown") == {"ring": 1.0}
    assert log.rails == {"head": {"eth1"}, "w1": {"eth1"}}
    assert "not over eth0" in read("ring.log", "tcp", "eth0", "10.9.0.0/24").problem()


def test_log_of_trees_and_rings_gives_each_its_share_of_the_bytes():
    log = read("tree.log", "verbs", "ib0")
    assert log.problem() is None
    assert log.shares("unknown") == {"tree": 0.75, "ring": 0.25}
    point = point_of(4).model_copy(update={"gpus_per_node": 4})
    both = transport.payload(point, 1, log.shares(""))
    tree, ring = (transport.payload(point, 1, {name: 1.0}) for name in ("tree", "ring"))
    assert both == pytest.approx(0.75 * tree + 0.25 * ring)


def test_flags_of_the_protocols_for_small_messages_are_expected_on_the_wire():
    log = read("tree.log", "verbs", "ib0")
    # LL for 1 MiB twice, LL128 for 2 MiB.
    assert log.flags == pytest.approx((2 * 2 + 2 * 128 / 120) / 4)
    assert read("ring.log", "tcp", "eth1").flags == 1.0
    once = counted({"fabric0": 1.0}, {})
    log = nccl_log.Log("tcp", "fabric0", "")
    log.read("n1:4:4 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}\n")
    assert once is None and "expected" in counted({"fabric0": 1.0}, {}, log=log)
    assert counted({"fabric0": 2.0}, {}, log=log) is None and counted({"fabric0": 2.0}, {}) is not None
    log.start_trial()
    assert log.flags == 1.0


def test_log_of_two_nodes_with_eight_gpus_sums_all_adapters():
    log = read("two-by-eight.log", "verbs", "ib0")
    assert log.problem() is None
    assert log.networks == ["IB"]
    ports = {f"mlx5_{n}:1": [f"ib{n}"] for n in range(4)}
    assert log.rails == {"head": set(ports), "w1": set(ports)}
    assert counted({f"ib{n}": 0.25 for n in range(4)}, ports, "verbs", "ib0", log) is None
    assert counted({f"ib{n}": 0.10 for n in range(4)}, ports, "verbs", "ib0", log) is not None


def test_log_of_several_socket_rails_sums_them():
    log = read("rails.log", "tcp", "eth1")
    assert log.problem() is None
    rails = {"eth1": 0.4, "eth2": 0.3, "eth3": 0.3}
    assert counted(rails, {}, fabric="eth1", log=log) is None
    assert "eth0 on head" in counted({**rails, "eth0": 0.8}, {}, fabric="eth1", log=log)


def test_log_of_a_fallback_to_sockets_is_a_problem():
    log = read("sockets.log", "verbs", "ib0")
    assert log.networks == ["IB", "Socket"]
    # The bytes are right, and the trial fails all the same.
    error = counted({"ib0": 1.0}, {"mlx5_0:1": ["ib0"]}, "verbs", "ib0", log)
    assert error == log.problem() == "NCCL sent over NET/Socket on w1, not over verbs on ib0"


def test_log_of_efa_is_no_problem_on_efa_only():
    log = read("efa.log", "efa", "ens5")
    assert log.networks == ["AWS Libfabric"]
    assert log.problem() is None
    assert log.shares("unknown") == {"ring": 1.0}
    assert "NET/AWS Libfabric on head" in read("efa.log", "tcp", "ens5").problem()


@pytest.mark.parametrize(
    ("line", "host", "network"),
    [
        # NCCL 2.4, 2.10 and 2.12, with a communicator, and with the prefixes of mpirun and of a log collector.
        ("n1:2771:2801 [0] NCCL INFO Ring 00 : 0 -> 1 [send] via NET/Socket/0", "n1", "Socket"),
        (
            "ip-10-0-1-2:46:51 [0] NCCL INFO Channel 00 : 1[1e0] -> 0[1e0] [send] via NET/Socket/0",
            "ip-10-0-1-2",
            "Socket",
        ),
        ("n1:27:72 [1] NCCL INFO Channel 00/0 : 1[101d0] -> 8[101c0] [send] via NET/IB/0/GDRDMA", "n1", "IB"),
        (
            "n1:927:927 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IBext_v8/0 comm 0x2 nRanks 02",
            "n1",
            "IBext_v8",
        ),
        (
            "[1,1]<stdout>:n1:21:26 [0] NCCL INFO Channel 00/0 : 1[f50] -> 0[350] [send] via NET/AWS Libfabric/0",
            "n1",
            "AWS Libfabric",
        ),
        # The plugin's name since 1.12.
        (
            "(pid=9) n1.site:1:257 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Libfabric/0/GDRDMA",
            "n1.site",
            "Libfabric",
        ),
    ],
)
def test_lines_of_every_version_of_nccl_name_host_and_network(line, host, network):
    kind = next(name for name, word in nccl_log.NETWORKS.items() if word in network)
    log = nccl_log.Log(kind, "eth1", "10.9.1.0/24")
    log.read(line + "\n")
    assert log.sends == {host: {network}}
    assert log.problem() is None


@pytest.mark.parametrize(
    ("line", "algorithm"),
    [
        ("n1:4:4 [0] NCCL INFO 4096 Bytes -> Algo 0 proto 2 time 34.69", "tree"),
        ("n1:4:4 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo Ring proto LL128 channel{Lo..Hi}={0..15}", "ring"),
        ("n1:4:4 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..15}", "tree"),
        (
            "n1:4:4 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo COLLNET_CHAIN proto SIMPLE channel{Lo..Hi}={0..1}",
            "in_network",
        ),
        # No sum of gradients.
        ("n1:4:4 [0] NCCL INFO Broadcast: 4096 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..0}", None),
    ],
)
def test_lines_of_every_version_of_nccl_name_the_algorithm(line, algorithm):
    log = nccl_log.Log("tcp", "eth1", "10.9.1.0/24")
    log.read(line + "\n")
    assert log.algorithm_bytes == ({algorithm: 4096} if algorithm else {})
