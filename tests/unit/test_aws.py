"""The aws provider without an account: its section of cluster.yml, prices, and host keys on a console."""

from pathlib import Path

import pytest
import yaml

from cluster import cost
from cluster.core import config, prices
from cluster.core.errors import UserError
from cluster.providers.aws.provider import host_key

GOOD = yaml.safe_load(config.cluster_file("aws").read_text())["cluster"]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config, "ROOT", tmp_path)
    path = tmp_path / "inventories/try/group_vars/all/cluster.yml"
    path.parent.mkdir(parents=True)

    def loaded(aws: dict | None = None, **changes: object) -> config.Cluster:
        values = {**GOOD, **changes, "aws": {**GOOD["aws"], **(aws or {})}}
        path.write_text(yaml.safe_dump({"cluster": {key: value for key, value in values.items() if value != "gone"}}))
        return config.load("try")

    return loaded


def test_shipped_file_is_valid(load):
    assert load().aws.instance_type == GOOD["aws"]["instance_type"]


@pytest.mark.parametrize(
    ("aws", "changes", "message"),
    [
        ({"instance_type": "g99.huge"}, {}, "cluster.aws.instance_type"),
        ({"region": "Ireland"}, {}, "cluster.aws.region"),
        ({"root_gb": 8}, {}, "cluster.aws.root_gb"),
        ({"subnet_id": "subnet-1a2b"}, {}, "aws.network"),
        ({"network": None}, {}, "aws.network"),
        ({"colour": "red"}, {}, "cluster.aws.colour"),
        ({"budget_usd": 0}, {}, "cluster.aws.budget_usd"),
        ({}, {"admin_cidrs": ["0.0.0.0/1", "128.0.0.0/1"]}, "admin_cidrs: 0.0.0.0/1 opens SSH to the world"),
    ],
)
def test_wrong_field_is_named_in_one_line(load, aws, changes, message):
    with pytest.raises(UserError) as caught:
        load(aws, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_section_is_required(load, tmp_path):
    load()
    path = tmp_path / "inventories/try/group_vars/all/cluster.yml"
    content = yaml.safe_load(path.read_text())
    del content["cluster"]["aws"]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match="aws: missing"):
        config.load("try")


def test_world_is_opened_only_with_the_explicit_field(load):
    assert load(admin_cidrs=["0.0.0.0/0"], allow_world_open=True).admin_cidrs == ["0.0.0.0/0"]


def test_hourly_price_is_instance_disk_and_address(load):
    alone = prices.instance_per_hour("g4dn.xlarge")
    assert cost.hourly("g4dn.xlarge", load()) == pytest.approx(alone + 100 * 0.08 / 730 + 0.005)
    assert cost.hourly("g4dn.xlarge", load({"spot": True})) < alone
    inside = load({"network": None, "subnet_id": "subnet-1a2b"})
    assert cost.hourly("g4dn.xlarge", inside) == pytest.approx(alone + 100 * 0.08 / 730)


def test_host_key_comes_from_the_last_complete_block():
    block = "-----BEGIN SSH HOST KEY KEYS-----\r\nssh-ed25519 {} root@x\r\n-----END SSH HOST KEY KEYS-----\r\n"
    assert host_key("boot\r\n" + block.format("AAAAold") + "again\r\n" + block.format("AAAAnew")) == (
        "ssh-ed25519 AAAAnew"
    )
    assert host_key("boot") is None
    assert host_key("-----BEGIN SSH HOST KEY KEYS-----\r\nssh-ed25519 AAAA root@x\r\n") is None
    assert host_key("ssh-ed25519 AAAAstray root@x\r\n-----END SSH HOST KEY KEYS-----") is None
