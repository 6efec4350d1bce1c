import socket

import pytest

SSH, JUPYTER, MPI, ELSEWHERE = 22, 8888, 20000, 5000
LISTEN = (
    "systemd-run --quiet --unit=listen-{port} --property=Restart=on-failure "
    "python3 -m http.server --bind 0.0.0.0 {port}"
)
CONNECT = """python3 -c '
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()' {address} {port}"""


@pytest.fixture(scope="module", autouse=True)
def listeners(nodes):
    """Something that answers behind every port: without the firewall all of these connections would pass."""
    for port in (JUPYTER, MPI, ELSEWHERE):
        nodes["head"].run(f"systemctl stop listen-{port}")
        nodes["head"].check_output(LISTEN.format(port=port))
        wait = f"sh -c 'for i in $(seq 50); do ss -Hltn sport = {port} | grep -q . && exit; sleep 0.1; done; exit 1'"
        nodes["head"].check_output(wait)


def from_here(address, port):
    try:
        socket.create_connection((address, port), timeout=3).close()
    except OSError:
        return False
    return True


def from_node(nodes, name, address, port):
    return nodes[name].run(CONNECT.format(address=address, port=port)).rc == 0


@pytest.mark.parametrize("port", [SSH, JUPYTER])
def test_admin_reaches_ssh_and_jupyter(nodes, port):
    assert from_here(nodes.address("head", "management"), port)


@pytest.mark.parametrize("port", [MPI, ELSEWHERE])
def test_admin_reaches_nothing_else(nodes, port):
    assert not from_here(nodes.address("head", "management"), port)


@pytest.mark.parametrize("port", [SSH, MPI, ELSEWHERE])
def test_fabric_peer_reaches_every_port(nodes, port):
    assert from_node(nodes, "w1", nodes.address("head"), port)


@pytest.mark.parametrize("port", [SSH, JUPYTER, MPI, ELSEWHERE])
def test_peer_gets_nothing_over_the_management_network(nodes, port):
    assert not from_node(nodes, "w1", nodes.address("head", "management"), port)


@pytest.mark.parametrize("network", ["management", "fabric"])
@pytest.mark.parametrize("port", [SSH, JUPYTER, MPI])
def test_outsider_reaches_nothing(nodes, port, network):
    assert not from_node(nodes, "outsider", nodes.address("head", network), port)


def test_outsider_could_connect_if_the_firewall_let_it(nodes):
    """So that the refusals above are the firewall's doing and not a missing route."""
    nodes["head"].check_output("nft add rule inet horovod_cluster input tcp dport 5000 accept")
    try:
        assert from_node(nodes, "outsider", nodes.address("head"), ELSEWHERE)
        assert from_node(nodes, "outsider", nodes.address("head", "management"), ELSEWHERE)
    finally:
        nodes["head"].check_output("nft --file /etc/nftables.conf")


def test_spoofed_peer_on_the_management_network_is_dropped(nodes):
    """A peer's fabric address counts only on the fabric interface."""
    head, w1 = nodes.address("head", "management"), nodes.address("w1")
    outsider = nodes["outsider"]
    outsider.check_output(f"ip address add {w1}/32 dev mgmt0")
    try:
        code = (
            "python3 -c 'import socket, sys; "
            "socket.create_connection((sys.argv[1], 20000), timeout=3, source_address=(sys.argv[2], 0))' "
        )
        before = int(nodes["head"].check_output("cat /sys/class/net/mgmt0/statistics/rx_packets"))
        assert outsider.run(f"{code}{head} {w1}").rc != 0
        after = int(nodes["head"].check_output("cat /sys/class/net/mgmt0/statistics/rx_packets"))
        assert after > before
        half_open = nodes["head"].check_output(f"ss -Htn state syn-recv sport = {MPI}")
        assert half_open == "", f"the head answered a spoofed peer: {half_open}"
    finally:
        outsider.check_output(f"ip address del {w1}/32 dev mgmt0")


def test_head_answers_ping_and_reaches_out(nodes):
    assert nodes["outsider"].run("ping -c 1 -W 2 %s", nodes.address("head")).rc == 0
    assert from_node(nodes, "head", nodes.address("outsider"), SSH)


def test_rules_are_there_again_after_a_restart(nodes):
    nodes.restart("w1")
    nodes["w1"].check_output(LISTEN.format(port=ELSEWHERE))
    nodes["w1"].check_output("sh -c 'until ss -Hltn sport = 5000 | grep -q .; do sleep 0.1; done'")
    assert from_node(nodes, "head", nodes.address("w1"), ELSEWHERE)
    assert not from_node(nodes, "outsider", nodes.address("w1"), ELSEWHERE)
    assert not from_here(nodes.address("w1", "management"), ELSEWHERE)
