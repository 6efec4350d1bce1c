"""Where EC2 can start nodes, and what a refusal of EC2 leads to; tests/aws does the same through Terraform."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import moto.ec2
import pytest
import yaml

from cluster.core import config, prices
from cluster.core.errors import UserError
from cluster.core.sections import Aws
from cluster.providers.aws import capacity, cards, expiry
from cluster.providers.aws.capacity import Reservation

GOOD = yaml.safe_load(config.cluster_file("aws").read_text())["cluster"]["aws"]
OFFERED = {kind: set() for kind in prices.types()}
OFFERED |= {"g4dn.xlarge": {"r-1a", "r-1b"}, "g4dn.2xlarge": {"r-1b"}, "t3.medium": {"r-1b", "r-1c"}}


def aws(**changes: object) -> Aws:
    return Aws.model_validate({**GOOD, **changes})


def test_zone_offers_the_types_of_head_and_workers():
    assert capacity.choose_zone(aws(), OFFERED, {}) == "r-1a"
    assert capacity.choose_zone(aws(head_type="t3.medium"), OFFERED, {}) == "r-1b"


@pytest.mark.parametrize(
    ("changes", "fixed", "message"),
    [
        ({}, {"cluster.yml": "r-1c"}, "cluster.aws.zone: r-1c does not offer g4dn.xlarge; zones that do: r-1a, r-1b"),
        ({}, {"head": "r-1a", "cluster.yml": "r-1b"}, "cluster.aws.zone: cluster.yml is in r-1b, but head is in r-1a"),
        ({"instance_type": "g5.xlarge"}, {}, "cluster.aws.instance_type: no zone of eu-west-1 offers g5.xlarge"),
    ],
)
def test_wrong_zone_names_the_right_ones(changes, fixed, message):
    with pytest.raises(UserError) as caught:
        capacity.choose_zone(aws(**changes), OFFERED, fixed)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("api error InsufficientInstanceCapacity: We currently do not have", "InsufficientInstanceCapacity"),
        ("Unsupported: Your requested instance type (p5) is not supported in your requested Availability Zone", "Unsu"),
        ("api error VcpuLimitExceeded: You have requested more vCPU", "VcpuLimitExceeded"),
        ("Unsupported: The requested configuration is currently not supported", ""),
        ("api error UnauthorizedOperation: You are not authorized", ""),
    ],
)
def test_refusals_for_lack_of_room_are_told_from_other_errors(text, code):
    assert capacity.refusal(text)[: len(code) or None] == code


def test_advice_fits_the_situation():
    def given(running: bool = False, code: str = "InsufficientInstanceCapacity", **changes: object) -> str:
        return capacity.advice(code, aws(**changes), "g4dn.xlarge", "r-1b", OFFERED, running)

    assert "set cluster.aws.zone to r-1a" in given()
    assert "another type with the same GPU: g4dn.2xlarge" in given()
    assert "set cluster.aws.zone" not in given(running=True)
    assert "spot: false" in given(spot=True)
    assert "spot: false" not in given()
    assert "quota of spot requests" in given(code="MaxSpotInstanceCountExceeded", spot=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instance_type": "g5.xlarge"}, "is for g5.xlarge"),
        ({"state": "scheduled"}, "is scheduled"),
        ({"free": 2}, "has room for 2 more nodes, but 3 are to be started"),
    ],
)
def test_reservation_that_does_not_fit_is_refused(changes, message):
    facts = {"id": "cr-1", "instance_type": "g4dn.xlarge", "zone": "r-1a", "state": "active", "free": 3}
    facts |= {"block": False, "placement_group": None, "end": None}
    capacity.check_reservation(Reservation(**facts), aws(), 3)
    with pytest.raises(UserError, match=message):
        capacity.check_reservation(Reservation(**facts | changes), aws(), 3)


def test_spot_and_reservation_exclude_each_other():
    with pytest.raises(ValueError, match="spot instances cannot use a capacity_reservation"):
        aws(spot=True, capacity_reservation="cr-0123")


def test_nodes_end_before_their_capacity_block():
    now = datetime.now(UTC)
    assert expiry.end_after(12, now + timedelta(hours=3)) == now + timedelta(hours=2.5)
    assert abs(expiry.end_after(12, None) - now - timedelta(hours=12)) < timedelta(minutes=1)


def test_card_is_the_one_with_the_address():
    answer = "2: ens5    inet 10.0.0.9/24 brd 10.0.0.255 scope global ens5\\  valid_lft forever\n"
    answer += "3: enp71s0    inet 10.0.0.10/24 metric 100 scope global enp71s0\n"
    assert cards.card(answer, "10.0.0.10") == "enp71s0"
    assert cards.card(answer, "10.0.0.1") is None


def test_facts_of_types_are_those_that_ec2_describes():
    """moto contains a recorded answer of DescribeInstanceTypes."""
    recorded = json.loads(
        gzip.decompress((Path(moto.ec2.__file__).parent / "resources/instance_types.json.gz").read_bytes())
    )
    missing = set(prices.types()) - recorded.keys()
    assert missing == {"p3.2xlarge", "p3.8xlarge", "p3.16xlarge"}, "EC2 has retired these"
    for name in prices.types().keys() - missing:
        known, described = prices.types()[name], recorded[name]
        network = described["NetworkInfo"]
        assert known.gpus == sum(gpu["Count"] for gpu in described.get("GpuInfo", {}).get("Gpus", [])), name
        assert known.efa == network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0), name
        assert known.scratch_gb == described.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0), name
        assert known.gbps == sum(card["BaselineBandwidthInGbps"] for card in network["NetworkCards"]), name
