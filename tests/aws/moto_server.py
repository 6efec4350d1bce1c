"""AWS as a server on loopback: moto plus the calls of terraform/aws that moto lacks.

    moto_server.py PORT_FILE      write the port to PORT_FILE and serve until terminated

Added: placement groups, and a console with a host key as cloud-init prints it (derived from the instance's id).
"""

from __future__ import annotations

import base64
import hashlib
import sys
import threading
from pathlib import Path

from moto.core.responses import ActionResult, EmptyResult
from moto.core.types import Base64EncodedString
from moto.ec2.responses import EC2Response
from moto.server import ThreadedMotoServer

GROUPS: dict[str, dict[str, object]] = {}


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
    return ActionResult({"PlacementGroups": [GROUPS[name] for name in names if name in GROUPS]})


def delete_placement_group(self: EC2Response) -> EmptyResult:
    GROUPS.pop(self._get_param("GroupName"), None)
    return EmptyResult()


moto_run_instances = EC2Response.run_instances


def run_instances(self: EC2Response) -> ActionResult:
    result = moto_run_instances(self)
    for instance in result.result.instances:
        instance.placement.group_name = self._get_param("Placement.GroupName") or ""
    return result


def serve(port_file: Path) -> None:
    for added in (get_console_output, create_placement_group, describe_placement_groups, delete_placement_group):
        setattr(EC2Response, added.__name__, added)
    EC2Response.run_instances = run_instances
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    port_file.with_suffix(".new").write_text(str(server.get_host_and_port()[1]))
    port_file.with_suffix(".new").rename(port_file)
    threading.Event().wait()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
