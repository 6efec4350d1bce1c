"""terraform/aws, applied by the real AWS provider to moto instead of an account.

The tests depend on each other and run in order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.core.config import ROOT
from cluster.core.progress import Progress
from cluster.core.state import State

ENV = "awstest"
pytestmark = pytest.mark.timeout(900)
APPLY = f"""
from cluster.core import config
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers import registry
from cluster.terraform import Root
state = State("{ENV}")
provider = registry.provider(state, config.load("{ENV}"))
progress = Progress()
provider.prepare(progress)
Root(state, provider.cluster, provider).apply([], progress)
"""


def cluster(*words: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / ".venv/bin/cluster", "--env", ENV, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_example_network_is_refused_before_anything_is_created(account, environment):
    environment(admin_cidrs=["203.0.113.0/24"])
    try:
        done = cluster("deploy")
    finally:
        environment(admin_cidrs=["192.168.7.0/24"])
    assert done.returncode == 2
    assert "cluster.admin_cidrs: 203.0.113.0/24 is an example network" in done.stderr
    assert account.vpcs() == []


def test_interrupted_apply_records_what_it_created(account):
    """Ctrl-C while the network is being created: the resources created so far are in Terraform's state."""
    process = subprocess.Popen(
        [sys.executable, "-c", APPLY], cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 300
        while not account.network_is_being_created():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline, "the apply never reached the network"
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode != 0
    assert account.instances() == {}
    recorded = {item["type"] for item in json.loads(State(ENV).tfstate.read_text())["resources"]}
    assert "aws_vpc" in recorded


def test_next_apply_completes_the_interrupted_one(account):
    made = account.apply()
    assert set(made.nodes) == {"head", "w1"}
    assert set(account.instances()) == {"head", "w1"}
    assert len(account.vpcs()) == 1


def test_plan_after_apply_finds_nothing_to_do(account):
    changed, text = account.root().plan()
    assert not changed, text


def test_contract_becomes_the_inventory(account):
    script = ROOT / f"inventories/{ENV}/terraform.py"
    done = subprocess.run([script], cwd=ROOT, capture_output=True, text=True, check=True)
    made = json.loads(done.stdout)
    instances = account.instances()
    assert made["cluster"]["hosts"] == ["head", "w1"]
    assert made["gpu"]["hosts"] == ["w1"]
    for name, instance in instances.items():
        assert made["_meta"]["hostvars"][name]["ansible_host"] == instance["PublicIpAddress"]
        assert made["_meta"]["hostvars"][name]["node_fabric_addresses"] == {"ena": instance["PrivateIpAddress"]}


def test_no_port_is_open_to_the_world(account):
    opened = {
        (rule.get("FromPort"), source["CidrIp"])
        for group in account.ec2.describe_security_groups()["SecurityGroups"]
        if group["VpcId"] == account.vpcs()[0]["VpcId"]
        for rule in group["IpPermissions"]
        for source in rule["IpRanges"]
    }
    assert opened == {(22, "192.168.7.0/24"), (8888, "192.168.7.0/24")}
    groups = {group["GroupId"] for one in account.instances().values() for group in one["SecurityGroups"]}
    assert groups == {account.group()["GroupId"]}


def test_disks_are_encrypted_and_metadata_needs_a_token(account):
    instances = account.instances()
    attached = [{"Name": "attachment.instance-id", "Values": [one["InstanceId"] for one in instances.values()]}]
    volumes = account.ec2.describe_volumes(Filters=attached)["Volumes"]
    assert len(volumes) == len(instances)
    assert all(volume["Encrypted"] for volume in volumes)
    assert {volume["VolumeType"] for volume in volumes} == {"gp3"}
    assert {one["MetadataOptions"]["HttpTokens"] for one in instances.values()} == {"required"}


def test_every_resource_has_owner_and_expiry_tags(account):
    expires = (State(ENV).dir / "expires").read_text()
    volumes = account.ec2.describe_volumes(Filters=[{"Name": "tag:HorovodCluster", "Values": [ENV]}])["Volumes"]
    assert len(volumes) == 2
    for resource in (*account.instances().values(), *volumes, *account.vpcs(), account.group()):
        tags = {tag["Key"]: tag["Value"] for tag in resource["Tags"]}
        assert (tags["HorovodCluster"], tags["Owner"], tags["Expires"]) == (ENV, "you@example.org", expires)


def test_workers_share_a_placement_group_and_the_bucket_is_private_and_encrypted(account):
    assert account.instances()["w1"]["Placement"]["GroupName"] == ENV
    blocked = account.s3.get_public_access_block(Bucket="awstest-data")["PublicAccessBlockConfiguration"]
    assert all(blocked.values())
    rules = account.s3.get_bucket_encryption(Bucket="awstest-data")["ServerSideEncryptionConfiguration"]["Rules"]
    assert [rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] for rule in rules] == ["aws:kms"]


def test_host_keys_come_from_the_console(account):
    made = account.root().output()
    account.provider().pin_host_keys(made, Progress(ENV))
    lines = State(ENV).known_hosts.read_text().splitlines()
    assert [line.split()[0] for line in lines] == [node.management_address for _, node in made.ordered()]
    assert all(line.split()[1] == "ssh-ed25519" for line in lines)
    progress = []
    account.provider().pin_host_keys(made, progress.append)
    assert progress == []
    assert State(ENV).known_hosts.read_text().splitlines() == lines


def test_each_node_names_its_card(account):
    made = account.root().output()
    assert made.interface("w1") == "ens5"
    assert account.provider().learn(made)
    made = account.deploy()
    assert {made.interface(name) for name in ("head", "w1")} == {"enp71s0"}
    assert not account.provider().learn(made)


def test_scaling_changes_only_the_difference(account):
    two = account.identifiers()
    assert set(account.apply(4).nodes) == {"head", "w1", "w2", "w3"}
    four = account.identifiers()
    assert two.items() < four.items()
    assert set(account.apply(3).nodes) == {"head", "w1", "w2"}
    three = account.identifiers()
    assert three == {name: four[name] for name in ("head", "w1", "w2")}


def test_port_opened_by_hand_is_found_and_closed(account):
    rule = {"IpProtocol": "tcp", "FromPort": 6006, "ToPort": 6006, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    before = account.identifiers()
    account.ec2.authorize_security_group_ingress(GroupId=account.group()["GroupId"], IpPermissions=[rule])
    changed, text = account.root(3).plan()
    assert changed
    assert "6006" in text
    account.apply(3)
    assert 6006 not in [rule.get("FromPort") for rule in account.group()["IpPermissions"]]
    assert account.identifiers() == before


def test_stopped_node_is_started(account):
    identifier = account.identifiers()["w2"]
    account.ec2.stop_instances(InstanceIds=[identifier])
    provider = account.provider(3)
    made = account.root(3).output()
    assert provider.node_states(made)["w2"].state == "stopped"
    assert provider.repair(made, Progress(ENV)) == []
    assert provider.node_states(made)["w2"].state == "running"


def test_cost_counts_running_nodes(account, environment):
    found = json.loads(cluster("cost", "--json").stdout)
    assert {row["node"]: row["type"] for row in found["nodes"]} == {
        "head": "t3.medium",
        "w1": "g4dn.xlarge",
        "w2": "g4dn.xlarge",
    }
    parts = [row["usd_per_hour"] for row in found["nodes"]]
    assert found["usd_per_hour"] == pytest.approx(sum(parts))
    # Instance prices plus those of disks and addresses.
    assert 0.0416 + 2 * 0.526 < found["usd_per_hour"] < 1.1 * (0.0416 + 2 * 0.526) + 0.1
    assert 0 < found["usd_so_far"] < found["usd_per_hour"]
    environment({"budget_usd": 1e-6})
    try:
        done = cluster("cost")
    finally:
        environment({"budget_usd": 50})
    assert done.returncode == 1
    assert f"over budget; to stop the cost: make destroy ENV={ENV}" in done.stdout


def test_destroy_names_leftovers_and_then_leaves_nothing(account):
    tags = [{"ResourceType": "volume", "Tags": [{"Key": "HorovodCluster", "Value": ENV}]}]
    forgotten = account.ec2.create_volume(AvailabilityZone="eu-west-1a", Size=8, TagSpecifications=tags)["VolumeId"]
    done = cluster("destroy")
    assert done.returncode == 3, done.stderr
    assert f"volumes {forgotten}" in done.stderr
    assert done.stderr.count("\n") == 1
    account.ec2.delete_volume(VolumeId=forgotten)
    done = cluster("destroy")
    assert done.returncode == 0, done.stderr
    assert account.instances() == {}
    assert account.vpcs() == []
    assert account.ec2.describe_volumes()["Volumes"] == []
    assert account.ec2.describe_placement_groups()["PlacementGroups"] == []
    assert account.ec2.describe_key_pairs()["KeyPairs"] == []
    assert account.s3.list_buckets()["Buckets"] == []
    assert not Path(State(ENV).dir).exists()


def test_bad_credentials_give_a_one_line_error(account, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    done = cluster("deploy")
    assert done.returncode == 2
    assert "AWS credentials" in done.stderr
    assert done.stderr.count("\n") == 1
