import json
import shlex
import time

PORTS = {"exporter": 9100, "prometheus": 9090}
MEGABYTES = 50
# Nodes have no curl.
ASK = """
import json, sys, urllib.parse, urllib.request
url = "http://127.0.0.1:9090/api/v1/query?" + urllib.parse.urlencode({"query": sys.argv[1]})
for row in json.load(urllib.request.urlopen(url, timeout=5))["data"]["result"]:
    print(json.dumps([row["metric"].get("node"), float(row["value"][1])]))
"""
REACH = "timeout 3 bash -c '</dev/tcp/{}/{}'"


def query(nodes, text):
    """node -> value, from Prometheus on the head."""
    done = nodes.run("head", shlex.join(["python3", "-c", ASK, text]))
    return dict(map(json.loads, done.stdout.splitlines()))


def wait_for(nodes, text, wanted, seconds=60):
    deadline = time.monotonic() + seconds
    while not wanted(found := query(nodes, text)):
        assert time.monotonic() < deadline, f"{text}: {found}"
        time.sleep(1)
    return found


def both_up(found):
    return found == {"head": 1, "w1": 1}


def test_head_collects_metrics_of_every_node(nodes):
    wait_for(nodes, 'up{job="node"}', both_up)


def test_bytes_over_the_fabric_are_counted(nodes):
    sent = 'sum by (node) (node_network_transmit_bytes_total{device="fabric0"})'
    before = wait_for(nodes, sent, lambda found: len(found) == 2)
    receiver = (
        "python3 -c 'import socket; c = socket.create_server((\"\", 7000)).accept()[0]\nwhile c.recv(1 << 20): pass'"
    )
    nodes["w1"].check_output(f"systemd-run --quiet --unit receiver {receiver}")
    try:
        push = f"until dd if=/dev/zero bs=1M count={MEGABYTES} 2>/dev/null >/dev/tcp/w1/7000; do sleep 0.2; done"
        assert nodes.run("head", f"timeout 30 bash -c {shlex.quote(push)}").rc == 0
    finally:
        nodes.run("w1", "systemctl stop receiver")
    grown = wait_for(nodes, sent, lambda found: found["head"] - before["head"] >= MEGABYTES << 20)
    assert grown["w1"] - before["w1"] < MEGABYTES << 19, "received bytes are counted as sent"


def test_cpu_and_disks_are_counted(nodes):
    names = ("node_cpu_seconds_total", "node_disk_read_bytes_total", "node_memory_MemAvailable_bytes")
    for name in names:
        assert set(query(nodes, f"sum by (node) ({name})")) == {"head", "w1"}, name


def test_nothing_listens_on_the_management_network(nodes):
    # From the node itself, so that no firewall is involved.
    for name in ("head", "w1"):
        address = nodes.address(name, "management")
        for port in PORTS.values():
            assert nodes.run(name, REACH.format(address, port)).rc != 0, f"{name} {port}"
    assert nodes.run("head", REACH.format("w1", PORTS["exporter"])).rc == 0


def test_prometheus_listens_on_the_heads_loopback_only(nodes):
    assert nodes.run("head", REACH.format("127.0.0.1", PORTS["prometheus"])).rc == 0
    assert nodes.run("w1", REACH.format("head", PORTS["prometheus"])).rc != 0
    assert not nodes["w1"].service("prometheus").is_running


def test_monitoring_uses_less_than_five_percent_of_one_core(nodes):
    """CPU seconds per second, for both services of the head together."""
    units = ("prometheus", "prometheus-node-exporter")

    def spent():
        show = "systemctl show --property MainPID --value {}"
        ids = [nodes["head"].check_output(show.format(unit)) for unit in units]
        ticks = nodes["head"].check_output(f"cat {' '.join(f'/proc/{pid}/stat' for pid in ids)}").splitlines()
        return sum(int(word) for line in ticks for word in line.rpartition(")")[2].split()[11:13]) / 100

    wait_for(nodes, 'up{job="node"}', both_up)
    begin, before = time.monotonic(), spent()
    time.sleep(20)
    share = (spent() - before) / (time.monotonic() - begin)
    assert share < 0.05, f"{share:.1%} of one core"


def test_services_run_again_after_a_restart(nodes):
    for name in ("head", "w1"):
        nodes.restart(name)
    wait_for(nodes, 'up{job="node"}', both_up)
