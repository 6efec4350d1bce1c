"""Nodes on EC2: check credentials, read host keys from the console, and list what a destroy left behind."""

from __future__ import annotations

import datetime
import ipaddress
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from cluster.core import files, prices, sections
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.providers import neighbours, ssh_server
from cluster.providers.base import Check, NodeState, Provider, Survivor

TAG = "HorovodCluster"
CREDENTIALS = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run `aws configure`"
EXAMPLE_NETWORKS = [ipaddress.ip_network(text) for text in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")]
# EC2 publishes the console output some minutes after boot.
CONSOLE_TIMEOUT = 600
SSH_TIMEOUT = 300
BEGIN, END = "-----BEGIN SSH HOST KEY KEYS-----", "-----END SSH HOST KEY KEYS-----"


@contextmanager
def aws_call(what: str) -> Iterator[None]:
    """Report an error of boto3 as one line."""
    try:
        yield
    except NoCredentialsError:
        raise InfraError(f"AWS: no credentials; {CREDENTIALS}") from None
    except (BotoCoreError, ClientError) as error:
        raise InfraError(f"AWS: {what}: {' '.join(str(error).split())}") from None


def host_key(console: str) -> str | None:
    """The last ed25519 key that cloud-init printed, as 'type key'; None if there is none yet."""
    _, begin, rest = console.rpartition(BEGIN)
    block, end, _ = rest.partition(END)
    found = re.search(r"\bssh-ed25519 \S+", block) if begin and end else None
    return found[0] if found else None


class Aws(Provider):
    section: sections.Aws
    own_key = True

    def client(self, service: str) -> Any:
        return boto3.client(service, region_name=self.section.region)

    @property
    def _tag_filter(self) -> list[dict[str, Any]]:
        return [{"Name": f"tag:{TAG}", "Values": [self.cluster.name]}]

    def check(self) -> None:
        neighbours.refuse_shared_name(self.state, self.cluster)
        for cidr in self.cluster.admin_cidrs:
            if any(ipaddress.ip_network(cidr).overlaps(example) for example in EXAMPLE_NETWORKS):
                raise UserError(f"cluster.admin_cidrs: {cidr} is an example network; use the network you work from")
        if self.cluster.ports.ssh != 22:
            raise UserError("cluster.ports.ssh: EC2 images listen on port 22; set it to 22")
        efa = [name for name, fabric in self.cluster.fabrics.items() if fabric.transport == "efa"]
        for kind in filter(None, (self.section.instance_type, self.section.head_type)):
            if efa and not prices.types()[kind].efa:
                fix = "use tcp, or an instance type with efa: true in cluster/core/instances.yml"
                raise UserError(f"cluster.fabrics.{efa[0]}.transport: {kind} has no EFA; {fix}")

    def prepare(self, progress: Progress) -> None:
        (credentials,) = self.checks()
        if not credentials.ok:
            raise UserError(f"{credentials.name}: {credentials.detail}; {credentials.fix}")
        expires = self.state.dir / "expires"
        if not expires.exists():
            # Written once: if every deploy moved the date, it would never be reached.
            end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=self.section.expires_hours)
            expires.write_text(end.strftime("%Y-%m-%dT%H:%MZ"))

    def variables(self) -> dict[str, str]:
        expires = self.state.dir / "expires"
        return {"expires": files.text(expires) if expires.exists() else "unset"}

    def instances(self) -> dict[str, dict[str, Any]]:
        """The cluster's instances by node name, without terminated ones."""
        found: dict[str, dict[str, Any]] = {}
        with aws_call("list instances"):
            pages = self.client("ec2").get_paginator("describe_instances").paginate(Filters=self._tag_filter)
            for instance in (one for page in pages for group in page["Reservations"] for one in group["Instances"]):
                if instance["State"]["Name"] not in ("terminated", "shutting-down"):
                    name = next(tag["Value"] for tag in instance["Tags"] if tag["Key"] == "Name")
                    found[name.removeprefix(f"{self.cluster.name}-")] = instance
        return found

    def node_states(self, contract: Contract) -> dict[str, NodeState]:
        return {
            name: NodeState(instance["State"]["Name"], int(instance["LaunchTime"].timestamp()))
            for name, instance in self.instances().items()
        }

    def survivors(self, known: set[str]) -> list[Survivor]:
        # Asking EC2 takes time and needs credentials: only where a cluster was deployed and Terraform knows no node.
        if known or not self.state.cluster_file.exists():
            return []
        return [Survivor(name, "Terraform cannot adopt EC2 instances") for name in self.instances()]

    def address(self, name: str) -> str:
        return f'aws_instance.node["{name}"]'

    def repair(self, contract: Contract, progress: Progress) -> list[str]:
        """Start stopped instances. Terraform replaces terminated ones itself, but it ignores stopped ones."""
        stopped = {name: one for name, one in self.instances().items() if one["State"]["Name"] == "stopped"}
        if stopped:
            progress(f"starting stopped nodes: {', '.join(stopped)}")
            ids = [one["InstanceId"] for one in stopped.values()]
            with aws_call("start instances"):
                self.client("ec2").start_instances(InstanceIds=ids)
                self.client("ec2").get_waiter("instance_running").wait(InstanceIds=ids)
        return []

    def wait_for_nodes(self, contract: Contract, progress: Progress) -> None:
        self.pin_host_keys(contract, progress)
        deadline = time.monotonic() + SSH_TIMEOUT
        for name, node in contract.ordered():
            progress.now("nodes", f"waiting for SSH on node {name}")
            if not ssh_server.wait_for(node.management_address, self.cluster.ports.ssh, deadline - time.monotonic()):
                fix = "check that cluster.admin_cidrs contains the address you connect from"
                raise InfraError(f"node {name}: no SSH on {node.management_address}; {fix}")
        progress.now("nodes", "")

    def pin_host_keys(self, contract: Contract, progress: Progress) -> None:
        """Read each node's host key from its console, which only users of the AWS account can read.

        The console drops old output, so a key is read once per instance; the line ends with the instance id.
        """
        known = files.text(self.state.known_hosts).splitlines() if self.state.known_hosts.exists() else []
        keys = {words[-1]: " ".join(words[1:3]) for words in map(str.split, known)}
        instances = self.instances()
        lines = []
        for name, node in contract.ordered():
            identifier = instances[name]["InstanceId"]
            if identifier not in keys:
                progress.now("nodes", f"waiting for the host key of node {name} on its console")
                keys[identifier] = self._read_console_key(name, identifier)
            lines.append(f"{node.management_address} {keys[identifier]} {identifier}\n")
        self.state.known_hosts.write_text("".join(lines))

    def _read_console_key(self, name: str, identifier: str) -> str:
        ec2 = self.client("ec2")
        deadline = time.monotonic() + CONSOLE_TIMEOUT
        while time.monotonic() < deadline:
            try:
                text = ec2.get_console_output(InstanceId=identifier, Latest=True).get("Output", "")
            except ClientError as error:
                # Only Nitro instances support Latest.
                if error.response["Error"]["Code"] != "UnsupportedOperation":
                    raise InfraError(f"node {name}: console: {error}") from None
                text = ec2.get_console_output(InstanceId=identifier).get("Output", "")
            if key := host_key(text):
                return key
            time.sleep(5)
        fix = f"run `aws ec2 get-console-output --instance-id {identifier}`"
        raise InfraError(f"node {name}: no host key on its console after {CONSOLE_TIMEOUT} s; {fix}")

    def leftovers(self) -> dict[str, list[str]]:
        """Resources with the cluster's tag, by kind; those that cost money first."""
        ec2 = self.client("ec2")
        found: dict[str, list[str]] = {"instances": [one["InstanceId"] for one in self.instances().values()]}
        with aws_call("list resources"):
            for kind, answer, key in (
                ("volumes", ec2.describe_volumes(Filters=self._tag_filter)["Volumes"], "VolumeId"),
                ("addresses", ec2.describe_addresses(Filters=self._tag_filter)["Addresses"], "AllocationId"),
                ("gateways", ec2.describe_nat_gateways(Filters=self._tag_filter)["NatGateways"], "NatGatewayId"),
                ("keys", ec2.describe_key_pairs(Filters=self._tag_filter)["KeyPairs"], "KeyName"),
                ("networks", ec2.describe_vpcs(Filters=self._tag_filter)["Vpcs"], "VpcId"),
                ("groups", ec2.describe_security_groups(Filters=self._tag_filter)["SecurityGroups"], "GroupId"),
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

    def remove_leftovers(self) -> None:
        """Only report them: resources with this tag may belong to a colleague's cluster of the same name."""
        if leftovers := self.leftovers():
            names = "; ".join(f"{kind} {' '.join(ids)}" for kind, ids in leftovers.items())
            where = f"AWS {self.section.region}: resources tagged {TAG}={self.cluster.name} exist"
            raise InfraError(f"{where}: {names}; remove them in the AWS console, or choose another cluster.name")

    def checks(self) -> list[Check]:
        try:
            account = self.client("sts").get_caller_identity()["Account"]
        except (BotoCoreError, ClientError) as error:
            return [Check("AWS credentials", False, " ".join(str(error).split()), CREDENTIALS)]
        return [Check("AWS credentials", True, f"account {account}, {self.section.region}")]
