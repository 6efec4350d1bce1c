"""Where EC2 can start the nodes: zones, capacity reservations, and what to change when it has no room."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from botocore.exceptions import ClientError

from cluster.core import prices, sections
from cluster.core.errors import UserError
from cluster.providers.aws.calls import aws_call

# What EC2 answers when it cannot start an instance of this type here and now.
NO_ROOM = re.compile(
    r"InsufficientInstanceCapacity|InsufficientHostCapacity|InsufficientReservedInstanceCapacity|UnfulfillableCapacity"
    r"|ReservationCapacityExceeded|SpotMaxPriceTooLow|Unsupported(?=: .*Availability Zone)"
)
QUOTA = re.compile(r"VcpuLimitExceeded|InstanceLimitExceeded|MaxSpotInstanceCountExceeded")
# Instance type -> the zones that offer it.
Offers = dict[str, set[str]]


@dataclass(frozen=True)
class Reservation:
    """A capacity reservation. block: a capacity block, which is bought for a fixed time."""

    id: str
    instance_type: str
    zone: str
    state: str
    free: int
    block: bool
    placement_group: str | None
    end: datetime | None


def offers(ec2: Any) -> Offers:
    """The zones of the region that offer each type of cluster/core/instances.yml."""
    found: Offers = {kind: set() for kind in prices.types()}
    with aws_call("list the zones of instance types"):
        pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
            LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": list(found)}]
        )
        for one in (one for page in pages for one in page["InstanceTypeOfferings"]):
            found[one["InstanceType"]].add(one["Location"])
    return found


def reservation(ec2: Any, identifier: str) -> Reservation:
    field = "cluster.aws.capacity_reservation"
    with aws_call(f"read reservation {identifier}"):
        try:
            answer = ec2.describe_capacity_reservations(CapacityReservationIds=[identifier])
        except ClientError as error:
            if not error.response["Error"]["Code"].startswith("InvalidCapacityReservationId"):
                raise
            raise UserError(f"{field}: {identifier} does not exist in this region and account") from None
    one = answer["CapacityReservations"][0]
    group = one.get("PlacementGroupArn")
    return Reservation(
        id=identifier,
        instance_type=one["InstanceType"],
        zone=one["AvailabilityZone"],
        state=one["State"],
        free=one["AvailableInstanceCount"],
        block=one.get("ReservationType") == "capacity-block",
        placement_group=group.rpartition("/")[2] if group else None,
        end=one.get("EndDate"),
    )


def check_reservation(found: Reservation, aws: sections.Aws, needed: int) -> None:
    """needed: nodes of its type that do not run yet."""
    field = f"cluster.aws.capacity_reservation: {found.id}"
    if found.instance_type != aws.instance_type:
        raise UserError(f"{field} is for {found.instance_type}; write that in cluster.aws.instance_type")
    if found.state != "active":
        raise UserError(f"{field} is {found.state}; deploy when it is active, or remove it from cluster.yml")
    if found.free < needed:
        raise UserError(f"{field} has room for {found.free} more nodes, but {needed} are to be started; lower nodes")


def choose_zone(aws: sections.Aws, offered: Offers, fixed: dict[str, str]) -> str:
    """The zone of the nodes. fixed: reason -> the zone that it requires, the strongest reason first."""
    kinds = sorted({aws.instance_type, aws.head_type or aws.instance_type})
    possible = sorted(set.intersection(*(offered[kind] for kind in kinds)))
    names = " and ".join(kinds)
    if not possible:
        others = ", ".join(similar(aws.instance_type, offered)) or "another type"
        raise UserError(
            f"cluster.aws.instance_type: no zone of {aws.region} offers {names}; write {others}, or another region"
        )
    (reason, zone), *rest = fixed.items() if fixed else [("", possible[0])]
    for other, wanted in rest:
        if wanted != zone:
            raise UserError(f"cluster.aws.zone: {other} is in {wanted}, but {reason} is in {zone}; use one zone")
    if zone not in possible:
        raise UserError(f"cluster.aws.zone: {zone} does not offer {names}; zones that do: {', '.join(possible)}")
    return zone


def similar(kind: str, offered: Offers, zone: str | None = None) -> list[str]:
    """Other types with the same GPU that are offered, in that zone or in any."""
    model = prices.types()[kind].gpu_model
    return [
        other
        for other, facts in prices.types().items()
        if other != kind and facts.gpu_model == model and (zone in offered[other] if zone else offered[other])
    ]


def refusal(error: str) -> str:
    """EC2's code if it had no room or no quota for an instance; "" for other errors."""
    found = NO_ROOM.search(error) or QUOTA.search(error)
    return found[0] if found else ""


def advice(code: str, aws: sections.Aws, kind: str, zone: str, offered: Offers, running: bool) -> str:
    """What to change, in one line. running: nodes of this cluster run, so it cannot move to another zone."""
    if QUOTA.fullmatch(code):
        what = "spot requests" if aws.spot else "on-demand instances"
        return f"increase the quota of {what} for {kind} in {aws.region} (Service Quotas, EC2; it counts vCPUs)"
    others = sorted(offered[kind] - {zone})
    types = similar(kind, offered, zone)
    ways = ["try again later"]
    if running:
        ways += [f"`make destroy` and deploy in zone {' or '.join(others)}"] if others else []
    elif others and not aws.subnet_id:
        ways += [f"set cluster.aws.zone to {' or '.join(others)}"]
    elif others:
        ways += [f"use a subnet in {' or '.join(others)}"]
    ways += [f"another type with the same GPU: {', '.join(types)}"] if types and not running else []
    ways += ["placement_group: false"] if aws.placement_group else []
    ways += ["spot: false"] if aws.spot else []
    return "; or ".join(ways)
