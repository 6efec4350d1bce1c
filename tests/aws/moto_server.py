"""AWS as a server on loopback: moto plus the calls of terraform/aws that moto lacks.

    moto_server.py PORT_FILE      write the port to PORT_FILE and serve until terminated

Added: placement groups, capacity reservations, what a shutdown does, and a console with a host key as cloud-init prints
it (derived from the instance's id). Files beside PORT_FILE control it: room.json limits how many instances can still be
started and has the error of the next one; reservations.json has the capacity reservations. runs.jsonl records what was
started.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
from pathlib import Path

from moto.core.responses import ActionResult, EmptyResult
from moto.core.types import Base64EncodedString
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.responses import EC2Response
from moto.server import ThreadedMotoServer

GROUPS: dict[str, dict[str, object]] = {}
FOLDER = Path(sys.argv[1]).parent
LOCK = threading.Lock()
REFUSALS = {
    "InsufficientInstanceCapacity": "We currently do not have sufficient {kind} capacity in the Availability Zone you "
    "requested ({zone}). Our system will be working on provisioning additional capacity.",
    "VcpuLimitExceeded": "You have requested more vCPU capacity than your current vCPU limit of 8 allows for the "
    "instance bucket that the specified instance type belongs to ({kind}).",
}


def host_key(instance_id: str) -> str:
    number = hashlib.sha256(instance_id.encode()).digest()
    blob = b"\0\0\0\x0bssh-ed25519" + b"\0\0\0\x20" + number
    return f"ssh-ed25519 {base64.b64encode(blob).decode()}"


def get_console_output(self: EC2Response) -> ActionResult:
    instance = self.ec2_backend.get_instance(self._get_param("InstanceId"))
    text = (
        "[   12.1] cloud-init: ci-info: no authorized SSH keys fingerprints found for user debian\r\n"
        "-----BEGIN SSH HOST KEY KEYS-----\r\n"
        f"ecdsa-sha2-nistp256 AAAAnot-this-one root@node\r\n{host_key(instance.id)} root@node\r\n"
        "-----END SSH HOST KEY KEYS-----\r\n"
    )
    return ActionResult({"InstanceId": instance.id, "Output": Base64EncodedString.from_raw_string(text)})


def create_placement_group(self: EC2Response) -> ActionResult:
    name = self._get_param("GroupName")
    tags = self._parse_tag_specification().get("placement-group", {})
    GROUPS[name] = {
        "GroupName": name,
        "GroupId": f"pg-{hashlib.sha256(name.encode()).hexdigest()[:17]}",
        "GroupArn": f"arn:aws:ec2:{self.region}:{self.current_account}:placement-group/{name}",
        "State": "available",
        "Strategy": self._get_param("Strategy"),
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
    }
    return ActionResult({"PlacementGroup": GROUPS[name]})


def describe_placement_groups(self: EC2Response) -> ActionResult:
    names = self._get_param("GroupNames", []) or list(GROUPS)
    found = [GROUPS[name] for name in names if name in GROUPS]
    for key, values in self._filters_from_querystring().items():
        found = [one for one in found if any({"Key": key[4:], "Value": value} in one["Tags"] for value in values)]
    return ActionResult({"PlacementGroups": found})


def delete_placement_group(self: EC2Response) -> EmptyResult:
    GROUPS.pop(self._get_param("GroupName"), None)
    return EmptyResult()


def describe_capacity_reservations(self: EC2Response) -> ActionResult:
    file = FOLDER / "reservations.json"
    known = json.loads(file.read_text()) if file.exists() else []
    wanted = self._get_param("CapacityReservationIds", [])
    found = [one for one in known if one["CapacityReservationId"] in wanted]
    if not found:
        raise EC2ClientError("InvalidCapacityReservationId.NotFound", f"The ID '{wanted}' does not exist")
    return ActionResult({"CapacityReservations": found})


moto_create_tags = EC2Response.create_tags


def create_tags(self: EC2Response) -> ActionResult | EmptyResult:
    given = {tag["Key"]: tag["Value"] for tag in self._get_param("Tags", [])}
    for group in GROUPS.values():
        if group["GroupId"] in self._get_param("Resources", []):
            kept = {tag["Key"]: tag["Value"] for tag in group["Tags"]} | given
            group["Tags"] = [{"Key": key, "Value": value} for key, value in kept.items()]
            return EmptyResult()
    return moto_create_tags(self)


moto_run_instances = EC2Response.run_instances


def take_room(kind: str, zone: str) -> None:
    """Refuse an instance as EC2 does when it has no room, if room.json says so."""
    file = FOLDER / "room.json"
    with LOCK:
        if not file.exists():
            return
        room = json.loads(file.read_text())
        if kind not in room["types"]:
            return
        if room["left"] == 0:
            raise EC2ClientError(room["code"], REFUSALS[room["code"]].format(kind=kind, zone=zone))
        file.write_text(json.dumps(room | {"left": room["left"] - 1}))


def run_instances(self: EC2Response) -> ActionResult:
    kind, subnet = self._get_param("InstanceType"), self._get_param("SubnetId")
    zone = self.ec2_backend.get_subnet(subnet).availability_zone if subnet else ""
    take_room(kind, zone)
    result = moto_run_instances(self)
    reservation = self._get_param("CapacityReservationSpecification", {})
    market = self._get_param("InstanceMarketOptions.MarketType")
    for instance in result.result.instances:
        instance.placement.group_name = self._get_param("Placement.GroupName") or ""
        instance.lifecycle = market
        # What the stand-in for ssh answers.
        (FOLDER / "private").mkdir(exist_ok=True)
        (FOLDER / "private" / str(instance.public_ip)).write_text(instance.private_ip)
        if reservation:
            instance.capacity_reservation_specification = reservation
        record = {"id": instance.id, "type": kind, "zone": zone, "market": market, "reservation": reservation}
        record["shutdown"] = self._get_param("InstanceInitiatedShutdownBehavior")
        record["user_data"] = base64.b64decode(self._get_param("UserData")).decode()
        with LOCK, (FOLDER / "runs.jsonl").open("a") as file:
            file.write(f"{json.dumps(record)}\n")
    return result


moto_modify_instance_attribute = EC2Response.modify_instance_attribute


def modify_instance_attribute(self: EC2Response) -> ActionResult | EmptyResult:
    """moto takes an attribute that it does not know for an empty list of security groups."""
    behaviour = self._get_param("InstanceInitiatedShutdownBehavior.Value")
    if behaviour is None:
        return moto_modify_instance_attribute(self)
    instance = self.ec2_backend.get_instance(self._get_param("InstanceId"))
    instance.instance_initiated_shutdown_behavior = behaviour
    return EmptyResult()


def serve(port_file: Path) -> None:
    for added in (
        *(get_console_output, run_instances, modify_instance_attribute, describe_capacity_reservations),
        *(create_tags, create_placement_group, describe_placement_groups, delete_placement_group),
    ):
        setattr(EC2Response, added.__name__, added)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    port_file.with_suffix(".new").write_text(str(server.get_host_and_port()[1]))
    port_file.with_suffix(".new").rename(port_file)
    threading.Event().wait()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
