"""Zones, reservations, EC2 without room, nodes that end themselves, and what an interrupted apply leaves.

The tests depend on each other and run in order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from conftest import ENV, Account
from test_aws import APPLY, cluster

from cluster.core import tfstate
from cluster.core.config import ROOT
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers.aws import expiry
from cluster.terraform import read_output

pytestmark = pytest.mark.timeout(900)


def recorded() -> set[str]:
    return set(tfstate.resources(State(ENV).tfstate))


def kill_apply_when_an_instance_exists(account: Account) -> None:
    """As a power failure would: Terraform has started an instance and has not recorded it."""
    State(ENV).prepare()
    process = subprocess.Popen([sys.executable, "-c", APPLY], cwd=ROOT, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not account.instances():
            assert process.poll() is None
            assert time.monotonic() < deadline, "the apply never started an instance"
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not any(address.startswith("aws_instance") for address in recorded())


def test_zone_is_one_that_offers_every_type(account, environment):
    environment({"instance_type": "p3dn.24xlarge"})
    try:
        provider = account.provider()
        provider.prepare(Progress(ENV))
        assert provider.variables()["zone"] == "eu-west-1b"
        environment({"instance_type": "p3dn.24xlarge", "zone": "eu-west-1a"})
        with pytest.raises(UserError, match=r"eu-west-1a does not offer .* that do: eu-west-1b, eu-west-1c"):
            account.provider().prepare(Progress(ENV))
        environment({"instance_type": "p3.2xlarge", "zone": None})
        with pytest.raises(UserError, match=r"no zone of eu-west-1 offers p3.2xlarge.*write p3dn.24xlarge"):
            account.provider().prepare(Progress(ENV))
    finally:
        environment({"instance_type": "g4dn.xlarge", "zone": None})


def test_first_deploy_without_room_leaves_nothing_and_names_other_zones_and_types(account):
    with account.room(left=0), pytest.raises(InfraError) as caught:
        account.deploy()
    text = str(caught.value)
    assert "EC2 cannot start g4dn.xlarge in eu-west-1a now (InsufficientInstanceCapacity)" in text
    assert "set cluster.aws.zone to eu-west-1b or eu-west-1c" in text
    assert "g4dn.2xlarge" in text
    assert "\n" not in text
    # The head had been started.
    assert [one["type"] for one in account.started()] == ["t3.medium"]
    assert account.resources() == {}
    assert account.s3.list_buckets()["Buckets"] == []
    assert recorded() == set()


def test_other_zone_works_after_that(account, environment):
    environment({"zone": "eu-west-1b"})
    assert set(account.deploy().nodes) == {"head", "w1"}
    assert {one["Placement"]["AvailabilityZone"] for one in account.instances().values()} == {"eu-west-1b"}


def test_cluster_that_runs_stays_in_its_zone(account, environment):
    environment({"zone": "eu-west-1c"})
    try:
        with pytest.raises(UserError, match="is in eu-west-1b"):
            account.provider().prepare(Progress(ENV))
    finally:
        environment({"zone": None})
    provider = account.provider()
    provider.prepare(Progress(ENV))
    assert provider.variables()["zone"] == "eu-west-1b"


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("InsufficientInstanceCapacity", "deploy in zone eu-west-1a or eu-west-1c"),
        ("VcpuLimitExceeded", "increase the quota of on-demand instances for g4dn.xlarge"),
    ],
)
def test_failed_scale_up_leaves_the_old_nodes_running(account, code, advice):
    before = account.identifiers()
    count = len(account.started())
    with account.room(left=1, code=code), pytest.raises(InfraError) as caught:
        account.deploy(4)
    assert f"({code})" in str(caught.value)
    assert "head, w1 keep running" in str(caught.value)
    assert advice in str(caught.value)
    # One of the two new nodes had been started.
    assert len(account.started()) == count + 1
    assert account.identifiers() == before
    assert recorded() >= {f'aws_instance.node["{name}"]' for name in before}
    assert set(read_output(State(ENV)).nodes) == {"head", "w1"}
    changed, text = account.root().plan()
    assert not changed, text


def test_nodes_end_themselves(account):
    end = expiry.read(State(ENV).dir / "expires")
    for one in account.started():
        assert one["shutdown"] == "terminate"
        given = yaml.safe_load(one["user_data"])
        files = {file["path"]: file["content"] for file in given["write_files"]}
        assert files["/etc/horovod-cluster/expires"] == f"{end:{expiry.FORMAT}}\n"
        assert files["/usr/local/sbin/cluster-expiry"].startswith("#!/bin/sh")
        assert ["systemctl", "enable", "--now", "--no-block", "cluster-expiry.timer"] in given["runcmd"]


def test_renew_moves_the_end_without_other_changes(account):
    path = State(ENV).dir / "expires"
    path.write_text("2020-01-01T00:00Z")
    with pytest.raises(UserError, match="expired at 2020-01-01T00:00Z; run `make renew`"):
        account.provider().prepare(Progress(ENV))
    done = cluster("renew")
    assert done.returncode == 0, done.stderr
    assert "nodes end themselves in 12.0 hours" in done.stdout
    end = path.read_text()
    for one in account.instances().values():
        assert {"Key": "Expires", "Value": end} in one["Tags"]
    account.deploy()
    changed, text = account.root().plan()
    assert not changed, text


def test_destroy_removes_instances_that_terraform_did_not_record(account):
    assert cluster("destroy").returncode == 0
    assert account.resources() == {}
    kill_apply_when_an_instance_exists(account)
    done = cluster("destroy")
    assert done.returncode == 0, done.stderr
    assert account.resources() == {}
    assert account.s3.list_buckets()["Buckets"] == []


def test_next_deploy_replaces_instances_that_terraform_did_not_record(account):
    kill_apply_when_an_instance_exists(account)
    strays = set(account.identifiers().values())
    assert set(account.deploy().nodes) == {"head", "w1"}
    answer = account.ec2.describe_instances(Filters=[{"Name": "instance-state-name", "Values": ["running"]}])
    running = [one["InstanceId"] for group in answer["Reservations"] for one in group["Instances"]]
    assert sorted(running) == sorted(account.identifiers().values())
    assert not strays & set(running)
    assert cluster("destroy").returncode == 0
    assert account.resources() == {}


def test_nodes_use_the_capacity_block(account, environment):
    identifier = "cr-0123456789abcdef0"
    block = {"CapacityReservationId": identifier, "InstanceType": "g4dn.xlarge", "AvailabilityZone": "eu-west-1c"}
    block |= {"State": "active", "AvailableInstanceCount": 1, "ReservationType": "capacity-block"}
    file = account.control / "reservations.json"
    file.write_text(json.dumps([block | {"EndDate": "2099-01-01T00:00:00Z"}]))
    environment({"capacity_reservation": identifier, "zone": None})
    try:
        with pytest.raises(UserError, match="has room for 1 more nodes, but 2 are to be started"):
            account.provider(3).prepare(Progress(ENV))
        account.deploy()
        assert {one["zone"] for one in account.started()[-2:]} == {"eu-west-1c"}
        by_type = {one["type"]: one for one in account.started()[-2:]}
        assert by_type["g4dn.xlarge"]["market"] == "capacity-block"
        assert by_type["g4dn.xlarge"]["reservation"]["CapacityReservationTarget"] == {
            "CapacityReservationId": identifier
        }
        assert by_type["t3.medium"]["market"] is None
        assert account.instances()["w1"]["Placement"]["GroupName"] == ""
        # It has no room left, and needs none.
        file.write_text(json.dumps([block | {"AvailableInstanceCount": 0, "EndDate": "2099-01-01T00:00:00Z"}]))
        changed, text = account.root().plan()
        assert not changed, text
    finally:
        environment({"capacity_reservation": None})
    assert cluster("destroy").returncode == 0
