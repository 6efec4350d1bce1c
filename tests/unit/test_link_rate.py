"""`rate_gbps: auto`: from the drivers of cards, measured, from the instance type, or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cluster.core import config, ssh
from cluster.core.errors import UserError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers.baremetal import link_rate
from cluster.providers.baremetal.provider import Baremetal

CARDS = {"node0": {"10g": "eth1"}, "node1": {"10g": "enp9s0"}}
SUBNET = {"subnet_id": "subnet-0123", "network": None}
UNKNOWN: dict[str, dict[str, int]] = {"node0": {}, "node1": {"enp9s0": 10000}}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., config.Cluster]:
    sources = {env: config.cluster_file(env).read_text() for env in ("aws", "baremetal", "local")}
    monkeypatch.setattr(config, "ROOT", tmp_path)

    def loaded(env: str, section: dict[str, object] | None = None, **fabric: object) -> config.Cluster:
        content = yaml.safe_load(sources[env])["cluster"]
        (name, given), *_ = content["fabrics"].items()
        content["fabrics"] = {name: given | {"rate_gbps": "auto"} | fabric}
        content |= {"active_fabric": name, **({env: content[env] | section} if section else {})}
        path = tmp_path / "inventories/try/group_vars/all/cluster.yml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump({"cluster": content}))
        return config.load("try")

    return loaded


@pytest.fixture
def metal(load, tmp_path: Path) -> Baremetal:
    state = State("try")
    state.dir = tmp_path / "state"
    state.dir.mkdir()
    provider = Baremetal(state, load("baremetal"))
    for one in provider.section.hosts:
        one.fabric_addresses["10g"] = "127.0.0.1"
    return provider


def here(provider: Baremetal, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let hosts be processes of this machine. Returns who was asked for what."""
    asked = []

    def run(commands, input, timeout=60):
        asked.extend(commands)
        words = {name: [sys.executable, *text.split()[1:]] for name, (_, text) in commands.items()}
        return ssh.gather(words, input, timeout)

    monkeypatch.setattr(provider, "run", run)
    monkeypatch.setattr(link_rate, "SECONDS", 0.2)
    return asked


def test_slowest_card_decides_where_all_drivers_tell_their_speed(metal, monkeypatch):
    asked = here(metal, monkeypatch)
    link_rate.find(metal, CARDS, {"node0": {"eth1": 25000}, "node1": {"enp9s0": 10000}}, Progress())
    assert metal.rates() == {"10g": 10.0}
    assert asked == []


def test_rate_is_measured_where_a_driver_does_not_tell_it_and_kept_until_a_card_changes(metal, monkeypatch):
    asked = here(metal, monkeypatch)
    link_rate.find(metal, CARDS, UNKNOWN, Progress())
    found = metal.rates()["10g"]
    assert found > 0.1
    assert asked == ["node1", "node0"]
    link_rate.find(metal, CARDS, UNKNOWN, Progress())
    assert metal.rates()["10g"] == found
    assert len(asked) == 2
    link_rate.find(metal, CARDS | {"node0": {"10g": "eth2"}}, UNKNOWN, Progress())
    assert len(asked) == 4


def test_deployed_cluster_has_a_number(metal, monkeypatch):
    assert metal.cluster.planned().fabrics["10g"].rate_gbps == config.ASSUMED_GBPS
    link_rate.find(metal, CARDS, {"node0": {"eth1": 40000}, "node1": {"enp9s0": 40000}}, Progress())
    text = metal.cluster.with_rates(metal.rates()).text()
    assert yaml.safe_load(text)["cluster"]["fabrics"]["10g"]["rate_gbps"] == 40.0
    assert json.loads((metal.state.dir / "rates.json").read_text())["10g"]["cards"] == {
        "node0": "eth1",
        "node1": "enp9s0",
    }


def test_failed_measurement_is_one_line_that_says_what_to_write(metal, monkeypatch):
    def refused(commands, input, timeout=60):
        return {name: subprocess.CompletedProcess([], 1, "", "Trace\nTimeoutError: timed out\n") for name in commands}

    monkeypatch.setattr(metal, "run", refused)
    with pytest.raises(UserError) as caught:
        link_rate.find(metal, CARDS, UNKNOWN, Progress())
    assert str(caught.value) == (
        "cluster.fabrics.10g.rate_gbps: auto: the drivers of the cards do not tell it, and measuring it from node0 to "
        "node1 (port 30499) failed: TimeoutError: timed out; write the rate in Gbit/s"
    )
    assert metal.rates() == {}


@pytest.mark.parametrize(
    ("instance", "transport", "place", "gbps"),
    [
        ("g4dn.xlarge", "tcp", {}, 5),
        ("p4d.24xlarge", "tcp", SUBNET, 100),
        ("p4d.24xlarge", "efa", {}, 100),
        ("p4d.24xlarge", "efa", SUBNET, 400),
        ("p5.48xlarge", "tcp", {}, 100),
    ],
)
def test_ec2_nodes_have_the_rate_of_the_cards_that_they_get(load, instance, transport, place, gbps):
    cluster = load("aws", {"instance_type": instance, **place}, transport=transport)
    assert next(iter(cluster.planned().fabrics.values())).rate_gbps == gbps


def test_slower_head_limits_the_rate(load):
    cluster = load("aws", {"instance_type": "g4dn.8xlarge", "head_type": "m5.xlarge"})
    assert next(iter(cluster.planned().fabrics.values())).rate_gbps == 1.25


@pytest.mark.parametrize(
    ("env", "section", "fabric", "message"),
    [
        ("baremetal", None, {"shaped": True}, "a shaped fabric is limited to a number; write the rate in Gbit/s"),
        ("local", None, {"shaped": False}, "only aws and baremetal find it out; write the rate in Gbit/s"),
        (
            "aws",
            {"instance_type": "p5.48xlarge", **SUBNET},
            {"transport": "efa"},
            "the nodes have 3200 Gbit/s on several cards",
        ),
        ("aws", None, {"rate_gbps": "fast"}, "rate_gbps: Input should be a valid number"),
    ],
)
def test_auto_is_refused_where_nobody_can_find_a_rate(load, env, section, fabric, message):
    with pytest.raises(UserError) as caught:
        load(env, section, **fabric)
    assert message in str(caught.value)
    assert "rate_gbps" in str(caught.value)
    assert "\n" not in str(caught.value)
