"""tasks/wheels.yml: packages go to the head once and from there over the fabric."""

import os

import pytest

SIZE = 20_000_000
CACHE = "/var/cache/horovod-cluster"


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels") / "0123456789ab"
    folder.mkdir()
    (folder / "package.whl").write_bytes(os.urandom(SIZE))
    return folder


def received(nodes, name):
    """Bytes that a node has received, by network."""
    text = nodes[name].check_output("cat /proc/net/dev")
    lines = [line.split() for line in text.splitlines()[2:]]
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[0] != "lo:"}


def give(nodes, wheelhouse):
    """Apply the tasks; returns the bytes that w1 received, by network."""
    before = received(nodes, "w1")
    done = nodes.apply("wheels", common_wheelhouse=str(wheelhouse), common_wheels_dir="/opt/wheels")
    assert done.returncode == 0, done.stdout
    wanted = nodes["head"].file("/opt/wheels/package.whl").sha256sum
    assert nodes["w1"].file("/opt/wheels/package.whl").sha256sum == wanted
    for name in nodes.names:
        nodes[name].check_output("rm -r /opt/wheels")
    after = received(nodes, "w1")
    return {network: after[network] - before[network] for network in after}


def test_workers_get_packages_from_the_head_over_the_fabric(nodes, wheelhouse):
    got = give(nodes, wheelhouse)
    assert got.pop("fabric0") > SIZE
    assert max(got.values()) < SIZE / 4, got


def test_only_the_head_keeps_the_archive_and_nothing_serves_it_afterwards(nodes):
    assert nodes["head"].file(f"{CACHE}/0123456789ab.tar").exists
    assert not nodes["w1"].file(f"{CACHE}/0123456789ab.tar").exists
    assert nodes.run("head", "systemctl is-active cluster-wheels").rc != 0
    assert "http.server" not in nodes["head"].check_output("ps -ef")


def test_head_and_worker_may_need_different_packages(nodes, wheelhouse):
    other = wheelhouse.with_name("fedcba987654")
    other.mkdir()
    (other / "other.whl").write_bytes(os.urandom(1000))
    done = nodes.apply(
        "wheels",
        common_wheelhouse="{{ wheels_of[inventory_hostname] }}",
        wheels_of={"head": str(other), "w1": str(wheelhouse)},
        common_wheels_dir="/opt/wheels",
    )
    assert done.returncode == 0, done.stdout
    assert nodes["head"].check_output("ls /opt/wheels") == "other.whl"
    assert nodes["w1"].check_output("ls /opt/wheels") == "package.whl"
    for name in nodes.names:
        nodes[name].check_output("rm -r /opt/wheels")


def test_worker_that_the_fabric_does_not_serve_gets_packages_from_the_controller(nodes, wheelhouse):
    nodes["w1"].check_output(f"ip route add unreachable {nodes.address('head')}/32")
    try:
        got = give(nodes, wheelhouse)
    finally:
        nodes["w1"].check_output(f"ip route del unreachable {nodes.address('head')}/32")
    assert got["fabric0"] < SIZE / 4, got
