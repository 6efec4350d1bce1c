"""Nodes on EC2: where they start, when they end, their host keys, and what is left of them."""

from __future__ import annotations

import ipaddress
import json
import re
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from cluster.core import files, prices, sections, tfstate
from cluster.core.contract import Contract, parse
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.core.state import write_file
from cluster.providers import neighbours, ssh_server
from cluster.providers.aws import capacity, cards, expiry, leftovers
from cluster.providers.aws.calls import CREDENTIALS, aws_call
from cluster.providers.base import Check, NodeState, Provider, Survivor, index

TAG = "HorovodCluster"
# What has it, this deployment created: another cluster may have the same name.
DEPLOYMENT_TAG = "HorovodDeployment"
EXAMPLE_NETWORKS = [ipaddress.ip_network(text) for text in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")]
# EC2 publishes the console output some minutes after boot.
CONSOLE_TIMEOUT = 600
SSH_TIMEOUT = 300
BEGIN, END = "-----BEGIN SSH HOST KEY KEYS-----", "-----END SSH HOST KEY KEYS-----"


def host_key(console: str) -> str | None:
    """The last ed25519 key that cloud-init printed, as 'type key'; None if there is none yet."""
    _, begin, rest = console.rpartition(BEGIN)
    block, end, _ = rest.partition(END)
    found = re.search(r"\bssh-ed25519 \S+", block) if begin and end else None
    return found[0] if found else None


class Aws(Provider):
    section: sections.Aws
    own_key = True
    renews_during_runs = True
    # Set by prepare, before Terraform needs them.
    zone: str | None = None
    reservation: capacity.Reservation | None = None

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
        running = self.instances()
        self._place(running)
        if not self._deployment.exists():
            write_file(self._deployment, str(uuid.uuid4()))
        end = expiry.read(self._expires)
        # If every deploy moved the date, it would never be reached.
        if end is None or (end < datetime.now(UTC) and not running):
            expiry.write(self._expires, self._end())
        elif end < datetime.now(UTC):
            raise UserError(
                f"ENV={self.state.env}: expired at {end:{expiry.FORMAT}}; run `make renew` or `make destroy`"
            )

    @property
    def _expires(self) -> Path:
        return self.state.dir / "expires"

    @property
    def _deployment(self) -> Path:
        return self.state.dir / "deployment"

    def _end(self) -> datetime:
        block = self.reservation.end if self.reservation and self.reservation.block else None
        return expiry.end_after(self.section.expires_hours, block)

    def _place(self, running: dict[str, dict[str, Any]]) -> None:
        """Choose the zone, and check the reservation."""
        ec2, aws = self.client("ec2"), self.section
        fixed = {}
        for name, one in running.items():
            fixed[name] = one["Placement"]["AvailabilityZone"]
        if aws.subnet_id:
            with aws_call(f"read {aws.subnet_id}"):
                (subnet,) = ec2.describe_subnets(SubnetIds=[aws.subnet_id])["Subnets"]
            fixed[aws.subnet_id] = subnet["AvailabilityZone"]
        if aws.capacity_reservation:
            self.reservation = capacity.reservation(ec2, aws.capacity_reservation)
            same = (aws.head_type or aws.instance_type) == aws.instance_type
            wanted = {name for name in self.cluster.planned().nodes if same or name != "head"}
            capacity.check_reservation(self.reservation, aws, len(wanted - running.keys()))
            fixed[aws.capacity_reservation] = self.reservation.zone
        if aws.zone:
            fixed["cluster.yml"] = aws.zone
        self.zone = capacity.choose_zone(aws, capacity.offers(ec2), fixed)

    def variables(self) -> dict[str, Any]:
        found: dict[str, Any] = {"zone": self.zone}
        for path in (self._expires, self._deployment):
            found[path.name] = files.text(path) if path.exists() else "unset"
        if self.reservation:
            found |= {"reservation_group": self.reservation.placement_group, "capacity_block": self.reservation.block}
        return found

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

    def before_apply(self, progress: Progress) -> None:
        known = {identifier for _, identifier in tfstate.identities(self.state.tfstate)}
        strays = {kind: [name for name in names if name not in known] for kind, names in self._own().items()}
        # The disk of an instance has no resource of its own, and goes with it.
        strays.pop("volumes", None)
        if any(strays.values()):
            text = "; ".join(f"{kind} {' '.join(names)}" for kind, names in strays.items() if names)
            progress(f"removing what an interrupted deploy created: {text}")
            leftovers.remove(self.client("ec2"), strays)

    def after_failure(self, error: InfraError, created: dict[str, str], undo: Callable[[], None] | None) -> InfraError:
        code = capacity.refusal(str(error))
        instances = [identifier for address, identifier in created.items() if address.startswith("aws_instance.")]
        if not code:
            ways = "`make deploy` continues from here, `make destroy` removes everything"
            return InfraError(f"{error}; {len(instances)} new nodes are billed: {ways}") if instances else error
        kind = next((name for name in sorted(prices.types(), key=len)[::-1] if name in str(error)), None)
        kind = kind or self.section.instance_type
        try:
            if undo:
                undo()
            else:
                # Terraform notices by itself that they are gone.
                leftovers.remove(self.client("ec2"), {"instances": instances})
            removed = "what this deploy created is removed"
        except InfraError as problem:
            removed = f"removing what this deploy created failed ({problem}), so run `make destroy`"
        running = self.instances()
        if running:
            removed += f", {', '.join(sorted(running, key=index))} keep running"
        offered = capacity.offers(self.client("ec2"))
        ways = capacity.advice(code, self.section, kind, self.zone or "", offered, bool(running))
        return InfraError(f"EC2 cannot start {kind} in {self.zone} now ({code}); {removed}; {ways}")

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
        self.wait_for_ssh(contract, progress)
        # Nodes that were stopped while the cluster was renewed have the old date.
        end = expiry.read(self._expires)
        if end and (names := expiry.send(contract, end, self.section.idle_minutes, contract.nodes)):
            progress(f"{', '.join(names)}: the date of their end could not be set; they may run for longer or shorter")

    def learn(self, contract: Contract) -> bool:
        found = cards.ask(contract, self.section.interface)
        write_file(self.state.dir / cards.FILE, json.dumps(found, indent=1))
        return any(
            contract.interface(name, fabric) != seen for name, one in found.items() for fabric, seen in one.items()
        )

    def wait_for_ssh(self, contract: Contract, progress: Progress) -> None:
        self.pin_host_keys(contract, progress)
        deadline = time.monotonic() + SSH_TIMEOUT
        for name, _ in contract.ordered():
            progress.now("nodes", f"waiting for SSH on node {name}")
            if not ssh_server.wait_for(contract.address(name), self.cluster.ports.ssh, deadline - time.monotonic()):
                fix = "check that cluster.admin_cidrs contains the address you connect from"
                raise InfraError(f"node {name}: no SSH on {contract.address(name)}; {fix}")
        progress.now("nodes", "")

    def pin_host_keys(self, contract: Contract, progress: Progress) -> None:
        """Read each node's host key from its console, which only users of the AWS account can read.

        The console drops old output, so a key is read once per instance; the line ends with the instance id.
        """
        known = files.text(self.state.known_hosts).splitlines() if self.state.known_hosts.exists() else []
        keys = {words[-1]: " ".join(words[1:3]) for words in map(str.split, known)}
        instances = self.instances()
        lines = []
        for name, _ in contract.ordered():
            identifier = instances[name]["InstanceId"]
            if identifier not in keys:
                progress.now("nodes", f"waiting for the host key of node {name} on its console")
                keys[identifier] = self._read_console_key(name, identifier)
            lines.append(f"{contract.address(name)} {keys[identifier]} {identifier}\n")
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
        found = leftovers.tagged(self.client("ec2"), TAG, self.cluster.name)
        with aws_call("list buckets"):
            if self.section.data_bucket and self._bucket_exists(self.section.data_bucket):
                found["buckets"] = [self.section.data_bucket]
        return found

    def _own(self) -> dict[str, list[str]]:
        """The same for what certainly this deployment created."""
        if not self._deployment.exists():
            return {}
        return leftovers.tagged(self.client("ec2"), DEPLOYMENT_TAG, files.text(self._deployment))

    def _bucket_exists(self, name: str) -> bool:
        try:
            self.client("s3").head_bucket(Bucket=name)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchBucket"):
                return False
            raise
        return True

    def remove_leftovers(self) -> None:
        """Remove what this deployment created. Only report the rest, which may belong to a colleague's cluster of the
        same name."""
        leftovers.remove(self.client("ec2"), self._own())
        if rest := self.leftovers():
            names = "; ".join(f"{kind} {' '.join(ids)}" for kind, ids in rest.items())
            where = f"AWS {self.section.region}: resources tagged {TAG}={self.cluster.name} exist"
            raise InfraError(f"{where}: {names}; remove them in the AWS console, or choose another cluster.name")

    def status_notes(self) -> list[str]:
        end = expiry.read(self._expires)
        return [expiry.note(end, self.state.env)] if end else []

    def renew(self) -> str:
        """Extend the lifetime on the nodes and in the tags. Nodes that do not answer keep their old date."""
        instances = self.instances()
        if not instances:
            raise UserError(f"ENV={self.state.env}: there are no nodes; run `make deploy ENV={self.state.env}`")
        # A stopped node gets the date from the deploy that starts it.
        running = [name for name, one in instances.items() if one["State"]["Name"] == "running"]
        if self.section.capacity_reservation:
            self.reservation = capacity.reservation(self.client("ec2"), self.section.capacity_reservation)
        end = self._end()
        value = tfstate.output(tfstate.read(self.state.tfstate))
        if value is None:
            raise UserError(f"ENV={self.state.env}: no finished deployment; run `make deploy` or `make destroy`")
        contract = parse(value)
        names = [name for name in running if name in contract.nodes]
        missed = expiry.send(contract, end, self.section.idle_minutes, names)
        expiry.write(self._expires, end)
        own = self._own()
        tags = [{"Key": expiry.TAG, "Value": end.strftime(expiry.FORMAT)}]
        with aws_call("set tags"):
            self.client("ec2").create_tags(Resources=[*own.get("instances", []), *own.get("volumes", [])], Tags=tags)
        if missed:
            raise InfraError(f"nodes {', '.join(missed)}: not reached, they end at the earlier date; run it again")
        return expiry.note(end, self.state.env)

    def checks(self) -> list[Check]:
        try:
            account = self.client("sts").get_caller_identity()["Account"]
        except (BotoCoreError, ClientError) as error:
            return [Check("AWS credentials", False, " ".join(str(error).split()), CREDENTIALS)]
        return [Check("AWS credentials", True, f"account {account}, {self.section.region}")]
