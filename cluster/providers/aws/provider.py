"""Nodes on EC2: credentials before Terraform, host keys from the console after it, and proof that nothing is left."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from cluster.core import prices, sections
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.providers.base import Check, NodeState, Provider, Say

TAG = "HorovodCluster"
CREDENTIALS = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run `aws configure`"
EXAMPLES = [ipaddress.ip_network(text) for text in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")]
# EC2 publishes a console some minutes after the boot.
CONSOLE_DEADLINE = 600
SSH_DEADLINE = 300
BEGIN, END = "-----BEGIN SSH HOST KEY KEYS-----", "-----END SSH HOST KEY KEYS-----"


@contextmanager
def one_line(what: str) -> Iterator[None]:
    try:
        yield
    except NoCredentialsError:
        raise InfraError(f"AWS: no credentials; {CREDENTIALS}") from None
    except (BotoCoreError, ClientError) as error:
        raise InfraError(f"AWS: {what}: {' '.join(str(error).split())}") from None


def host_key(console: str) -> str | None:
    """The ed25519 key that cloud-init printed last, as 'type key', or None when there is none yet."""
    _, begin, rest = console.rpartition(BEGIN)
    block, end, _ = rest.partition(END)
    for line in block.splitlines() if begin and end else ():
        words = line.split()
        if "ssh-ed25519" in words[:-1]:
            at = words.index("ssh-ed25519")
            return " ".join(words[at : at + 2])
    return None


class Aws(Provider):
    @property
    def section(self) -> sections.Aws:
        assert self.cluster.aws  # noqa: S101 (config.load saw to it)
        return self.cluster.aws

    def client(self, service: str) -> Any:
        return boto3.client(service, region_name=self.section.region)

    @property
    def _tagged(self) -> list[dict[str, Any]]:
        return [{"Name": f"tag:{TAG}", "Values": [self.cluster.name]}]

    def prepare(self, say: Say) -> None:
        for cidr in self.cluster.admin_cidrs:
            if any(ipaddress.ip_network(cidr).overlaps(example) for example in EXAMPLES):
                raise UserError(f"cluster.admin_cidrs: {cidr} is only an example; write the network you work from")
        if self.cluster.ports.ssh != 22:
            raise UserError("cluster.ports.ssh: EC2's images listen on 22; use that")
        verbs = [name for name, fabric in self.cluster.fabrics.items() if fabric.transport == "verbs"]
        for kind in filter(None, (self.section.instance_type, self.section.head_type)):
            if verbs and not prices.types()[kind].efa:
                fix = "use tcp, or an instance type with efa in cluster/core/instances.yml"
                raise UserError(f"cluster.fabrics.{verbs[0]}.transport: {kind} has no EFA; {fix}")
        credentials = self._credentials()
        if not credentials.ok:
            raise UserError(f"{credentials.name}: {credentials.detail}; {credentials.fix}")
        expires = self.state.dir / "expires"
        if not expires.exists():
            # Set once: a tag that moves with every deploy would never be reached.
            end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=self.section.expires_hours)
            expires.write_text(end.strftime("%Y-%m-%dT%H:%MZ"))

    def variables(self) -> dict[str, str]:
        expires = self.state.dir / "expires"
        return {"expires": expires.read_text() if expires.exists() else "unset"}

    def instances(self) -> dict[str, dict[str, Any]]:
        """The cluster's instances by node name, those that are gone left out."""
        found: dict[str, dict[str, Any]] = {}
        with one_line("list instances"):
            pages = self.client("ec2").get_paginator("describe_instances").paginate(Filters=self._tagged)
            for instance in (one for page in pages for group in page["Reservations"] for one in group["Instances"]):
                if instance["State"]["Name"] not in ("terminated", "shutting-down"):
                    name = next(tag["Value"] for tag in instance["Tags"] if tag["Key"] == "Name")
                    found[name.removeprefix(f"{self.cluster.name}-")] = instance
        return found

    def states(self, contract: Contract) -> dict[str, NodeState]:
        return {
            name: NodeState(instance["State"]["Name"], int(instance["LaunchTime"].timestamp()))
            for name, instance in self.instances().items()
        }

    def repair(self, contract: Contract, say: Say) -> list[str]:
        """A node that is gone Terraform notices by itself; one that was stopped it leaves as it is."""
        stopped = {
            name: one["InstanceId"] for name, one in self.instances().items() if one["State"]["Name"] == "stopped"
        }
        if stopped:
            say(f"{', '.join(stopped)}: stopped; starting")
            with one_line("start instances"):
                self.client("ec2").start_instances(InstanceIds=list(stopped.values()))
                self.client("ec2").get_waiter("instance_running").wait(InstanceIds=list(stopped.values()))
        return []

    def applied(self, contract: Contract, say: Say) -> None:
        self.pin_host_keys(contract, say)
        deadline = time.monotonic() + SSH_DEADLINE
        for name, node in contract.ordered():
            while not _answers(node.management_address, self.cluster.ports.ssh):
                if time.monotonic() > deadline:
                    hint = "does admin_cidrs hold the address you come from?"
                    raise InfraError(f"node {name}: no SSH on {node.management_address}; {hint}")
                time.sleep(2)

    def pin_host_keys(self, contract: Contract, say: Say) -> None:
        """Only the account can read a console, so the key that cloud-init printed there is the node's own.

        A console forgets, so a key is read once per instance, whose id stands behind it as a comment.
        """
        known = self.state.known_hosts.read_text().splitlines() if self.state.known_hosts.exists() else []
        instances = self.instances()
        lines = []
        for name, node in contract.ordered():
            identifier = instances[name]["InstanceId"]
            mine = [line for line in known if line.endswith(f" {identifier}")]
            if mine:
                key = " ".join(mine[0].split()[1:3])
            else:
                say(f"node {name}: reading its host key from the console")
                key = self._key_from_console(name, identifier)
            lines.append(f"{node.management_address} {key} {identifier}\n")
        self.state.known_hosts.write_text("".join(lines))

    def _key_from_console(self, name: str, identifier: str) -> str:
        ec2 = self.client("ec2")
        deadline = time.monotonic() + CONSOLE_DEADLINE
        while time.monotonic() < deadline:
            try:
                text = ec2.get_console_output(InstanceId=identifier, Latest=True).get("Output", "")
            except ClientError as error:
                # Only Nitro types show their newest output at once.
                if error.response["Error"]["Code"] != "UnsupportedOperation":
                    raise InfraError(f"node {name}: console: {error}") from None
                text = ec2.get_console_output(InstanceId=identifier).get("Output", "")
            key = host_key(text)
            if key:
                return key
            time.sleep(5)
        look = f"aws ec2 get-console-output --instance-id {identifier}"
        raise InfraError(f"node {name}: no host key on its console after {CONSOLE_DEADLINE} s; look: {look}")

    def left(self) -> dict[str, list[str]]:
        """What the account still has under the cluster's tag, by kind; first what costs money."""
        ec2 = self.client("ec2")
        found: dict[str, list[str]] = {"instances": [one["InstanceId"] for one in self.instances().values()]}
        with one_line("list what is left"):
            for kind, answer, key in (
                ("volumes", ec2.describe_volumes(Filters=self._tagged)["Volumes"], "VolumeId"),
                ("addresses", ec2.describe_addresses(Filters=self._tagged)["Addresses"], "AllocationId"),
                ("gateways", ec2.describe_nat_gateways(Filters=self._tagged)["NatGateways"], "NatGatewayId"),
                ("keys", ec2.describe_key_pairs(Filters=self._tagged)["KeyPairs"], "KeyName"),
                ("networks", ec2.describe_vpcs(Filters=self._tagged)["Vpcs"], "VpcId"),
                ("groups", ec2.describe_security_groups(Filters=self._tagged)["SecurityGroups"], "GroupId"),
            ):
                found[kind] = [one[key] for one in answer if one.get("State") not in ("deleted", "deleting")]
            if self.section.data_bucket and self._bucket_exists(self.section.data_bucket):
                found["buckets"] = [self.section.data_bucket]
        return {kind: names for kind, names in found.items() if names}

    def _bucket_exists(self, name: str) -> bool:
        try:
            self.client("s3").head_bucket(Bucket=name)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchBucket"):
                return False
            raise
        return True

    def sweep(self) -> None:
        """Nothing is removed by its tag alone: it may be a colleague's cluster of the same name."""
        left = self.left()
        if left:
            names = "; ".join(f"{kind} {' '.join(ids)}" for kind, ids in left.items())
            fix = "remove them in the AWS console, or choose another cluster.name"
            raise InfraError(f"AWS {self.section.region} has, tagged {TAG}={self.cluster.name}: {names}; {fix}")

    def _credentials(self) -> Check:
        try:
            account = self.client("sts").get_caller_identity()["Account"]
        except (BotoCoreError, ClientError) as error:
            return Check("AWS credentials", False, " ".join(str(error).split()), CREDENTIALS)
        return Check("AWS credentials", True, f"account {account}, {self.section.region}")

    def checks(self) -> list[Check]:
        return [self._credentials()]


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
