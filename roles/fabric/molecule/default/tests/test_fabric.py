"""Tests compare rates of one run with each other. Only the ratio counts, because the machine may be busy."""

import json

import pytest

PORT = 5201
SLOW, FAST = 50, 200
SECONDS = 2


@pytest.fixture(autouse=True)
def configured_rate(nodes):
    yield
    for name in nodes.names:
        nodes[name].check_output("fabric-rate reset")


def set_rate(nodes, name, mbit):
    done = nodes.as_user(name, f"sudo -n /usr/local/sbin/fabric-rate set {mbit}")
    assert done.rc == 0, done.stderr


def measured(nodes, sender, receiver, *options):
    """Received rate in Mbit/s."""
    nodes[receiver].check_output(f"iperf3 --server --one-off --daemon --port {PORT}")
    command = f"iperf3 --client {nodes.address(receiver)} --port {PORT} --time {SECONDS} --json {' '.join(options)}"
    done = json.loads(nodes[sender].run(command).stdout)
    assert "error" not in done, done
    return done["end"]["sum_received"]["bits_per_second"] / 1e6


def configured(nodes):
    return {name: json.loads(nodes[name].check_output("fabric-rate show"))["mbit"] for name in nodes.names}


def test_rate_of_the_active_fabric_is_set(nodes, scenario):
    fabrics = scenario.cluster
    assert set(configured(nodes).values()) == {fabrics.fabrics[fabrics.active_fabric].rate_gbps * 1000}


def test_sending_is_limited_to_the_senders_rate(nodes):
    rates = {}
    for mbit in (SLOW, FAST):
        set_rate(nodes, "head", mbit)
        rates[mbit] = measured(nodes, "head", "w1")
    assert rates[FAST] / rates[SLOW] == pytest.approx(FAST / SLOW, rel=0.2), rates


def test_receiving_is_limited_to_the_receivers_rate(nodes):
    rates = {}
    for mbit in (SLOW, FAST):
        set_rate(nodes, "head", mbit)
        rates[mbit] = measured(nodes, "w1", "head")
    assert rates[FAST] / rates[SLOW] == pytest.approx(FAST / SLOW, rel=0.2), rates


def test_two_senders_share_the_receivers_rate(nodes):
    set_rate(nodes, "head", SLOW)
    alone = measured(nodes, "w1", "head")
    nodes["head"].check_output(f"iperf3 --server --one-off --daemon --port {PORT + 1}")
    nodes["w2"].check_output(
        f"systemd-run --quiet iperf3 --client {nodes.address('head')} --port {PORT + 1} --time {SECONDS + 3}"
    )
    beside = measured(nodes, "w1", "head")
    assert beside < 0.9 * alone, f"alone {alone:.0f} Mbit/s, beside another sender {beside:.0f}"


def test_rate_lowered_under_traffic_does_not_block_the_fabric(nodes):
    nodes["head"].check_output(f"iperf3 --server --one-off --daemon --port {PORT + 2}")
    nodes["w2"].check_output(
        f"systemd-run --quiet iperf3 --client {nodes.address('head')} --port {PORT + 2} --time {SECONDS + 1}"
    )
    for _ in range(5):
        nodes["head"].check_output("fabric-rate reset")
        set_rate(nodes, "head", SLOW)
    assert nodes["w1"].run("ping -c 20 -i 0.1 -W 1 %s", nodes.address("head")).rc == 0


def test_management_network_is_not_limited(nodes):
    set_rate(nodes, "head", SLOW)
    limited = measured(nodes, "w1", "head")
    nodes["head"].check_output(f"iperf3 --server --one-off --daemon --port {PORT}")
    command = f"iperf3 --client {nodes.address('head', 'management')} --port {PORT} --time 1 --json"
    free = json.loads(nodes["w1"].check_output(command))["end"]["sum_received"]["bits_per_second"] / 1e6
    assert free > 4 * limited, f"management {free:.0f} Mbit/s, fabric {limited:.0f}"


def test_configured_rate_is_restored_after_a_restart(nodes):
    before = configured(nodes)
    set_rate(nodes, "w1", SLOW)
    assert configured(nodes)["w1"] == SLOW
    slow = measured(nodes, "head", "w1")
    nodes.restart("w1")
    nodes["w1"].check_output("systemctl is-system-running --wait || true")
    assert configured(nodes) == before
    assert measured(nodes, "head", "w1") > 4 * slow


def test_invalid_arguments_are_refused_and_change_nothing(nodes):
    before = configured(nodes)["head"]
    for words in ("set", "set fast", "set 0", "set 10 0", "set -5", "slower", "set 10 2 3"):
        done = nodes["head"].run(f"fabric-rate {words}")
        assert done.rc != 0, words
        assert "Traceback" not in done.stderr
    assert configured(nodes)["head"] == before


def test_training_account_may_run_no_other_command_as_root(nodes):
    assert nodes.as_user("head", "sudo -n /usr/sbin/tc qdisc show").rc != 0
    assert nodes.as_user("head", "sudo -n true").rc != 0
