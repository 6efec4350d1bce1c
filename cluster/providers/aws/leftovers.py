"""What exists on EC2 with a tag, and its removal in an order that EC2 accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.providers.aws.calls import aws_call

# Kind, call that lists it, key of the list, key of the identifier. What costs money is first; removal keeps this order.
KINDS = (
    ("instances", "describe_instances", "Reservations", "InstanceId"),
    ("volumes", "describe_volumes", "Volumes", "VolumeId"),
    ("addresses", "describe_addresses", "Addresses", "AllocationId"),
    ("gateways", "describe_nat_gateways", "NatGateways", "NatGatewayId"),
    ("templates", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
    ("placement groups", "describe_placement_groups", "PlacementGroups", "GroupName"),
    ("keys", "describe_key_pairs", "KeyPairs", "KeyName"),
    ("subnets", "describe_subnets", "Subnets", "SubnetId"),
    ("routes", "describe_route_tables", "RouteTables", "RouteTableId"),
    ("internet gateways", "describe_internet_gateways", "InternetGateways", "InternetGatewayId"),
    ("groups", "describe_security_groups", "SecurityGroups", "GroupId"),
    ("networks", "describe_vpcs", "Vpcs", "VpcId"),
)
GONE = ("deleted", "deleting", "terminated", "shutting-down")


def tagged(ec2: Any, tag: str, value: str) -> dict[str, list[str]]:
    """Resources with this tag, by kind."""
    found = {}
    for kind, call, key, identifier in KINDS:
        with aws_call(f"list {kind}"):
            # One page holds 1000 resources and a cluster has at most 64 nodes.
            items = getattr(ec2, call)(Filters=[{"Name": f"tag:{tag}", "Values": [value]}])[key]
        if kind == "instances":
            items = [one for group in items for one in group["Instances"]]
        # A VPC's own default group goes with the VPC.
        names = [one[identifier] for one in items if state(one) not in GONE and one.get("GroupName") != "default"]
        if names:
            found[kind] = names
    return found


def state(resource: dict[str, Any]) -> str:
    given = resource.get("State", "")
    return str(given["Name"] if isinstance(given, dict) else given)


def remove(ec2: Any, found: dict[str, list[str]]) -> None:
    """Delete what `tagged` found."""
    if instances := found.get("instances"):
        with aws_call("terminate instances"):
            ec2.terminate_instances(InstanceIds=instances)
            ec2.get_waiter("instance_terminated").wait(InstanceIds=instances)
    for kind, *_ in KINDS:
        for name in found.get(kind, []) if kind in DELETE else []:
            with aws_call(f"delete {name}"):
                DELETE[kind](ec2, name)


def delete_volume(ec2: Any, name: str) -> None:
    # The root disk of an instance goes with it.
    if ec2.describe_volumes(Filters=[{"Name": "volume-id", "Values": [name]}])["Volumes"]:
        ec2.delete_volume(VolumeId=name)


def delete_internet_gateway(ec2: Any, name: str) -> None:
    (gateway,) = ec2.describe_internet_gateways(InternetGatewayIds=[name])["InternetGateways"]
    for attached in gateway["Attachments"]:
        ec2.detach_internet_gateway(InternetGatewayId=name, VpcId=attached["VpcId"])
    ec2.delete_internet_gateway(InternetGatewayId=name)


DELETE: dict[str, Callable[[Any, str], object]] = {
    "volumes": delete_volume,
    "templates": lambda ec2, name: ec2.delete_launch_template(LaunchTemplateId=name),
    "placement groups": lambda ec2, name: ec2.delete_placement_group(GroupName=name),
    "keys": lambda ec2, name: ec2.delete_key_pair(KeyName=name),
    "subnets": lambda ec2, name: ec2.delete_subnet(SubnetId=name),
    "routes": lambda ec2, name: ec2.delete_route_table(RouteTableId=name),
    "internet gateways": delete_internet_gateway,
    "groups": lambda ec2, name: ec2.delete_security_group(GroupId=name),
    "networks": lambda ec2, name: ec2.delete_vpc(VpcId=name),
}
