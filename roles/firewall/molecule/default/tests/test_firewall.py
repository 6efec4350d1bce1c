import hashlib
import subprocess

import pytest

SSH, JUPYTER, MPI, ELSEWHERE = 22, 8888, 20000, 5000
NETWORKS = ("management", "fabric")
LISTEN = (
    "systemd-run --quiet --unit=listen-{port} --property=Restart=on-failure "
    "python3 -m http.server --bind 0.0.0.0 {port}"
)
# Connects to all ADDRESS:PORT at the same time and prints those that accept.
CONNECT = """python3 -c '
import socket, sys
from concurrent.futures import ThreadPoolExecutor
def connects(target):
    address, port = target.split(":")
    try:
        socket.create_connection((address, int(port)), timeout=3).close()
    except OSError:
        return False
    return True
with ThreadPoolExecutor() as pool:
    print(*(t for t, yes in zip(sys.argv[1:], pool.map(connects, sys.argv[1:])) if yes))' """


@pytest.fixture(scope="module", autouse=True)
def listeners(nodes):
    """Listen on every port: without the firewall, all connections would succeed."""
    for port in (JUPYTER, MPI, ELSEWHERE):
        nodes["head"].run(f"systemctl stop listen-{port}")
        nodes["head"].check_output(LISTEN.format(port=port))
        wait = f"sh -c 'for i in $(seq 50); do ss -Hltn sport = {port} | grep -q . && exit; sleep 0.1; done; exit 1'"
        nodes["head"].check_output(wait)


def targets(nodes, node, network, ports):
    return [f"{nodes.address(node, network)}:{port}" for port in ports]


def from_here(tried):
    command = ["sh", "-c", CONNECT + " ".join(tried)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def from_node(nodes, name, tried):
    return nodes[name].check_output(CONNECT + " ".join(tried)).split()


def test_admin_reaches_ssh_and_jupyter_and_nothing_else(nodes):
    tried = targets(nodes, "head", "management", [SSH, JUPYTER, MPI, ELSEWHERE])
    assert from_here(tried) == tried[:2]


def test_fabric_peer_reaches_every_port(nodes):
    tried = targets(nodes, "head", "fabric", [SSH, JUPYTER, MPI, ELSEWHERE])
    assert from_node(nodes, "w1", tried) == tried


def test_fabric_peer_reaches_no_port_over_the_management_network(nodes):
    assert from_node(nodes, "w1", targets(nodes, "head", "management", [SSH, JUPYTER, MPI, ELSEWHERE])) == []


def test_outsider_reaches_no_port_on_either_network(nodes):
    tried = [text for network in NETWORKS for text in targets(nodes, "head", network, [SSH, JUPYTER, MPI, ELSEWHERE])]
    assert from_node(nodes, "outsider", tried) == []


def test_outsider_connects_when_the_firewall_allows_it(nodes):
    """This proves that the firewall refused the connections above, not a missing route."""
    nodes["head"].check_output("nft add rule inet horovod_cluster input tcp dport 5000 accept")
    try:
        tried = [text for network in NETWORKS for text in targets(nodes, "head", network, [ELSEWHERE])]
        assert from_node(nodes, "outsider", tried) == tried
    finally:
        nodes["head"].check_output("nft --file /etc/horovod-cluster/firewall.nft")


def test_spoofed_peer_on_the_management_network_is_dropped(nodes):
    """A peer's fabric address is accepted only on the fabric interface."""
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
        assert half_open == "", f"the head replied to a spoofed peer: {half_open}"
    finally:
        outsider.check_output(f"ip address del {w1}/32 dev mgmt0")


def test_head_answers_ping_and_opens_outgoing_connections(nodes):
    assert nodes["outsider"].run("ping -c 1 -W 2 %s", nodes.address("head")).rc == 0
    tried = targets(nodes, "outsider", "fabric", [SSH])
    assert from_node(nodes, "head", tried) == tried


def test_rules_are_loaded_again_after_a_restart(nodes):
    nodes.restart("w1")
    nodes["w1"].check_output(LISTEN.format(port=ELSEWHERE))
    nodes["w1"].check_output("sh -c 'until ss -Hltn sport = 5000 | grep -q .; do sleep 0.1; done'")
    tried = targets(nodes, "w1", "fabric", [ELSEWHERE])
    assert from_node(nodes, "head", tried) == tried
    assert from_node(nodes, "outsider", tried) == []
    assert from_here(targets(nodes, "w1", "management", [ELSEWHERE])) == []


def test_rules_of_others_stay(nodes):
    """What Docker forwards, and the file of nftables.service: neither loading nor stopping our rules touches them."""
    w1 = nodes["w1"]
    w1.check_output("nft add table ip docker")
    w1.check_output("nft 'add chain ip docker FORWARD { type filter hook forward priority filter; policy accept; }'")
    before = w1.check_output("sh -c 'nft list table ip docker; sha256sum /etc/nftables.conf'")
    w1.check_output("systemctl restart cluster-firewall")
    assert "hook forward" not in w1.check_output("nft list table inet horovod_cluster")
    w1.check_output("systemctl stop cluster-firewall")
    assert "horovod_cluster" not in w1.check_output("nft list tables")
    assert w1.check_output("sh -c 'nft list table ip docker; sha256sum /etc/nftables.conf'") == before
    w1.check_output("systemctl start cluster-firewall")
    w1.check_output("nft delete table ip docker")


def test_admin_reaches_ssh_over_ipv6(nodes, scenario):
    """The outsider takes an address in the admin network, then one outside it."""
    cidrs = [*scenario.cluster.admin_cidrs, "fd00:78:1::/64"]
    assert nodes.apply("configure", firewall_admin_cidrs=cidrs).returncode == 0
    head, outsider = nodes["head"], nodes["outsider"]
    code = "python3 -c 'import socket; socket.create_connection((\"fd00:78::1\", 22), timeout=3)'"
    for node, address in ((head, "fd00:78::1/32"), (outsider, "fd00:78:1::5/32")):
        node.check_output("sysctl -qw net.ipv6.conf.mgmt0.disable_ipv6=0 || true")
        node.check_output(f"ip -6 address add {address} dev mgmt0 nodad")
    try:
        assert outsider.run(code).rc == 0
        outsider.check_output("ip -6 address del fd00:78:1::5/32 dev mgmt0")
        outsider.check_output("ip -6 address add fd00:78:2::5/32 dev mgmt0 nodad")
        assert outsider.run(code).rc != 0
    finally:
        outsider.check_output("ip -6 address flush dev mgmt0 scope global")
        head.check_output("ip -6 address del fd00:78::1/32 dev mgmt0")
        assert nodes.apply("configure").returncode == 0


def test_late_confirmation_is_not_called_a_lock_out(nodes):
    before = nodes["head"].check_output("nft list table inet horovod_cluster")
    done = nodes.apply("configure", firewall_confirm_seconds=0, firewall_admin_ports=[22, 8888, 9999])
    assert done.returncode != 0
    assert "its confirmation came after 0 s" in done.stdout
    assert "admin_cidrs" not in done.stdout
    assert nodes["head"].check_output("nft list table inet horovod_cluster") == before
    assert nodes.apply("configure").returncode == 0


def test_unconfirmed_rules_are_rolled_back(nodes):
    """The new rules lock the controller out, so the node receives no confirmation."""
    w1 = nodes["w1"]
    tried = targets(nodes, "w1", "management", [SSH])
    before = w1.check_output("nft list table inet horovod_cluster")
    w1.check_output("sh -c 'sed \"/tcp dport/d\" /etc/horovod-cluster/firewall.nft > /root/closed.conf'")
    w1.check_output("firewall-apply check /root/closed.conf")
    w1.check_output("sh -c 'cp /root/closed.conf /etc/horovod-cluster/firewall.nft && firewall-apply apply 4'")
    assert from_here(tried) == []
    w1.check_output(
        "sh -c 'for i in $(seq 60); do systemctl -q is-active firewall-rollback.timer || exit 0; sleep 0.5; done'"
    )
    w1.check_output("sh -c 'while systemctl -q is-active firewall-rollback.service; do sleep 0.2; done'")
    assert from_here(tried) == tried
    assert w1.check_output("nft list table inet horovod_cluster") == before
    assert "tcp dport" in w1.check_output("cat /etc/horovod-cluster/firewall.nft")


def test_pending_rules_of_an_interrupted_run_are_confirmed_too(nodes):
    """The file does not change, but the pending command loads the rules. Unconfirmed, they would be rolled back."""
    w1 = nodes["w1"]
    command = "/usr/local/sbin/firewall-apply apply 60"
    note = f"/var/lib/horovod-cluster/pending/{hashlib.sha256(command.encode()).hexdigest()[:16]}"
    w1.check_output(f"sh -c 'mkdir -p $(dirname {note}) && printf %s \"{command}\" > {note}'")
    done = nodes.apply("configure")
    assert done.returncode == 0, done.stdout
    assert not w1.file(note).exists
    assert w1.run("systemctl -q is-active firewall-rollback.timer").rc != 0
    assert "tcp dport" in w1.check_output("nft list table inet horovod_cluster")
