import json

COUNTERS = "cat /sys/class/net/{}/statistics/tx_bytes /sys/class/net/{}/statistics/rx_bytes"
SECONDS = 0.5


def bytes_over(nodes, name, interface):
    return sum(map(int, nodes[name].check_output(COUNTERS.format(interface, interface)).split()))


def test_mpirun_from_the_head_returns_the_sum(nodes):
    done = nodes.as_user("head", "mpirun -H head:1,w1:1 mpi-hello")
    assert done.rc == 0, done.stderr
    assert json.loads(done.stdout) == {"ranks": 2, "sum": 1, "wrong": 0, "gbps": []}


def test_hostfile_starts_one_process_per_node(nodes):
    done = nodes.as_user("head", "mpirun --hostfile /etc/horovod-cluster/hostfile hostname")
    assert sorted(done.stdout.split()) == ["head", "w1"], done.stderr


def test_traffic_uses_the_fabric_and_not_the_management_network(nodes):
    before = {card: bytes_over(nodes, "w1", card) for card in ("fabric0", "mgmt0")}
    done = nodes.as_user("head", f"mpirun -H head:1,w1:1 mpi-hello {1000 * SECONDS:.0f} 0 1000 1")
    result = json.loads(done.stdout)
    assert result["wrong"] == 0
    assert len(result["gbps"]) == 2
    moved = {card: bytes_over(nodes, "w1", card) - before[card] for card in before}
    assert moved["fabric0"] >= 0.8 * SECONDS * sum(result["gbps"]) * 1e9 / 8, moved
    assert moved["mgmt0"] < 0.01 * moved["fabric0"], moved


def test_worker_accepts_the_head_from_the_fabric_only(nodes):
    known = "-o HostKeyAlias=w1 -o GlobalKnownHostsFile=/etc/horovod-cluster/known_hosts"
    login = f"ssh -o BatchMode=yes -o ConnectTimeout=5 {known} {{}} hostname"
    assert nodes.as_user("head", login.format(nodes.address("w1"))).stdout.strip() == "w1"
    over_management = nodes.as_user("head", login.format(nodes.address("w1", "management")))
    assert over_management.rc != 0
    assert "Permission denied" in over_management.stderr


def test_mesh_key_allows_no_terminal_and_no_forwarding(nodes):
    assert "PTY allocation request failed" in nodes.as_user("head", "ssh -tt w1 tty").stderr
    forwarded = nodes.as_user("head", "ssh -o ExitOnForwardFailure=yes -o BatchMode=yes -R 7000:localhost:22 w1 true")
    assert forwarded.rc != 0


def test_workers_cannot_log_in_to_each_other_or_to_the_head(nodes):
    done = nodes.as_user("w1", "ssh -o BatchMode=yes -o ConnectTimeout=5 head hostname")
    assert done.rc != 0
    assert "Permission denied" in done.stderr


def test_mpirun_refuses_a_node_with_another_host_key(nodes):
    """ssh expects the head's key from w1, as if an impostor had taken an address."""
    done = nodes.as_user("head", "mpirun --mca plm_rsh_args '-o HostKeyAlias=head' -H w1:1 hostname")
    assert done.rc != 0
    assert "Host key verification failed" in done.stderr


def test_openmpi_runs_over_ucx(nodes):
    """No verbs here, so UCX uses TCP. This proves that the packages of OpenMPI and UCX work together."""
    before = bytes_over(nodes, "w1", "fabric0")
    ucx = "--mca pml ucx --mca btl self,vader --mca opal_common_ucx_tls any --mca opal_common_ucx_devices any"
    given = "-x UCX_TLS=tcp,self,sm -x UCX_NET_DEVICES=fabric0"
    done = nodes.as_user("head", f"mpirun {ucx} {given} -H head:1,w1:1 mpi-hello")
    assert done.rc == 0, done.stderr
    assert json.loads(done.stdout)["wrong"] == 0
    # A million floats each way.
    assert bytes_over(nodes, "w1", "fabric0") - before > 4_000_000
