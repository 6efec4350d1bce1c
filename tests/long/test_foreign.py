"""Other traffic on the fabric during a sweep is noticed, and none is seen where there is none."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "e2e"), str(TESTS / "drill")]

import environments  # noqa: E402
from environments import podman  # noqa: E402
from faults import Scene  # noqa: E402

ENV = "foreign"
NODES = ["head", "w1"]
# A quarter of what the scale model leaves of 1 Gbit/s for two nodes.
MBIT = 60
SERVE = """
import socket
connection, _ = socket.create_server(("", 7777)).accept()
while connection.recv(1 << 16): pass
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7777))
begin, sent, block = time.monotonic(), 0, bytes(1 << 14)
while True:
    connection.sendall(block)
    sent += len(block)
    time.sleep(max(0, sent / (float(sys.argv[2]) * 125e3) - (time.monotonic() - begin)))
"""
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module", autouse=True)
def deployed():
    environments.remove(ENV)
    environments.make_env(ENV, 86, len(NODES))
    environments.cluster("deploy", env=ENV)
    yield
    environments.remove(ENV)


def sent_bytes() -> int:
    return int(podman("exec", f"{ENV}-head", "cat", "/sys/class/net/fabric0/statistics/tx_bytes"))


@pytest.fixture
def traffic():
    """A flow from the head to w1, of the training account."""
    address = environments.contract(ENV)["_meta"]["hostvars"]["w1"]["node_fabric_addresses"]["1g"]
    podman("exec", "-d", "-u", "horovod", f"{ENV}-w1", "python3", "-c", SERVE)
    time.sleep(1)
    podman("exec", "-d", "-u", "horovod", f"{ENV}-head", "python3", "-c", SEND, address, str(MBIT))
    before = sent_bytes()
    time.sleep(4)
    assert sent_bytes() - before > MBIT * 125e3, "the test's own traffic does not use the fabric"
    yield
    podman("exec", f"{ENV}-head", "pkill", "-f", "create_connection")


def sweep(run: str, *words: str) -> tuple[str, list[dict]]:
    scene = Scene(ENV, NODES)
    plan = scene.state.dir / "foreign.yml"
    plan.write_text(
        json.dumps({"nodes": [2], "batches": [32, 64], "fabrics": ["1g"], "engines": ["horovod"], "seconds": 4})
    )
    argv = [environments.BIN / "bench", "sweep", "--env", ENV, "--plan", plan, "--run", run, *words]
    done = environments.run(*argv, ok=False)
    return done.stdout + done.stderr, list(map(json.loads, (scene.results / run / "trials.jsonl").open()))


@pytest.mark.parametrize("words", [[], ["--no-check"]], ids=["checked", "unchecked"])
def test_trial_with_foreign_traffic_fails_and_names_the_sender(traffic, words: list[str]) -> None:
    printed, trials = sweep(f"foreign{len(words)}", *words)
    assert [trial["status"] for trial in trials] == ["failed", "failed"], trials
    for trial in trials:
        assert "other work on the nodes: head: python3 -c" in trial["error"]
        assert trial.get("images_per_second") is None
    assert "FAILED" in printed


def test_trial_on_quiet_nodes_passes() -> None:
    _, trials = sweep("quiet")
    assert [trial["status"] for trial in trials] == ["ok", "ok"], trials
