"""An environment on AWS, simulated by moto on loopback: our Terraform root and the real AWS provider, unmodified."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

from cluster import lifecycle, recovery
from cluster.core import config
from cluster.core.contract import Contract
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers import registry
from cluster.providers.aws import leftovers
from cluster.providers.aws.provider import Aws
from cluster.terraform import Root

ROOT = Path(__file__).resolve().parents[2]
ENV = "awstest"
REGION = "eu-west-1"


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with the files that control moto_server.py."""
    folder = tmp_path_factory.mktemp("moto")
    port = folder / "port"
    with (folder / "log").open("w") as log:
        command = [sys.executable, Path(__file__).parent / "moto_server.py", port]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    # The addresses of simulated instances belong to others: nothing may connect to them. The nodes seem idle and empty.
    (folder / "bin").mkdir()
    # Each has two cards, and the second one has its address.
    node = f"""#!/bin/sh
    case "$*" in
      *find*) echo 0 0 ;;
      *"ip -o -4"*)
        for word; do case $word in *@*) address=${{word#*@}} ;; esac; done
        printf '2: eth9    inet 192.0.2.1/24 brd 192.0.2.255 scope global eth9\\n'
        printf '3: enp71s0    inet %s/24 scope global enp71s0\\n' "$(cat {folder}/private/$address)" ;;
    esac
    """
    (folder / "bin/ssh").write_text(textwrap.dedent(node))
    (folder / "bin/ssh").chmod(0o755)
    values = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
        # moto answers unknown calls with an error, which the provider would retry for minutes.
        "AWS_MAX_ATTEMPTS": "2",
    }
    unwanted = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION")
    before = dict(os.environ)
    try:
        deadline = time.monotonic() + 120
        while not port.exists():
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "moto did not start"
            time.sleep(0.1)
        for name in unwanted:
            os.environ.pop(name, None)
        os.environ.update(values, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port.read_text()}")
        yield folder
    finally:
        server.terminate()
        server.wait(timeout=30)
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def environment(moto: Path) -> Iterator[Callable[..., Any]]:
    """inventories/awstest; call the fixture to change fields of its cluster.yml."""
    folder = ROOT / "inventories" / ENV
    path = folder / "group_vars/all/cluster.yml"

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(ROOT / ".state" / ENV, ignore_errors=True)

    def change(aws: dict[str, Any] | None = None, **values: Any) -> None:
        content = yaml.safe_load(path.read_text())
        content["cluster"] |= values
        content["cluster"]["aws"] |= aws or {}
        path.write_text(yaml.safe_dump(content))

    remove()
    shutil.copytree(ROOT / "inventories/aws", folder, symlinks=True)
    images = boto3.client("ec2", region_name=REGION)
    images.register_image(Name="debian-12-amd64-20250101-1000", RootDeviceName="/dev/xvda")
    change(
        {
            "ami": {"id": None, "owner": "self", "name": "debian-12-amd64-*"},
            "head_type": "t3.medium",
            "data_bucket": "awstest-data",
            "region": REGION,
        },
        name=ENV,
        nodes=2,
        admin_cidrs=["192.168.7.0/24"],
    )
    State(ENV).prepare()
    yield change
    remove()


class Account:
    """The environment under test, and the account's resources as boto3 reports them."""

    def __init__(self, control: Path) -> None:
        self.control = control
        self.ec2 = boto3.client("ec2", region_name=REGION)
        self.s3 = boto3.client("s3", region_name=REGION)

    def provider(self, nodes: int | None = None) -> Aws:
        found = registry.provider(State(ENV), config.load(ENV, nodes))
        assert isinstance(found, Aws)
        return found

    def root(self, nodes: int | None = None) -> Root:
        provider = self.provider(nodes)
        provider.prepare(Progress(ENV))
        return Root(State(ENV), provider.cluster, provider)

    def apply(self, nodes: int | None = None) -> Contract:
        root = self.root(nodes)
        root.apply([], Progress())
        return root.output()

    def deploy(self, nodes: int | None = None) -> Contract:
        """The part of a deploy that calls Terraform."""
        state, cluster = State(ENV), config.load(ENV, nodes)
        found = recovery.examine(state, cluster, nodes, replace=False)
        found.provider.check()
        state.prepare()
        found.provider.prepare(Progress(ENV))
        return lifecycle.apply(found, Progress())

    @contextmanager
    def room(self, left: int, code: str = "InsufficientInstanceCapacity") -> Iterator[None]:
        """EC2 has room for so many more workers."""
        file = self.control / "room.json"
        file.write_text(json.dumps({"types": ["g4dn.xlarge"], "left": left, "code": code}))
        yield
        file.unlink()

    def started(self) -> list[dict[str, Any]]:
        """What instances were started with, in order."""
        return [json.loads(line) for line in (self.control / "runs.jsonl").read_text().splitlines()]

    def resources(self) -> dict[str, list[str]]:
        return leftovers.tagged(self.ec2, "HorovodCluster", ENV)

    def instances(self) -> dict[str, dict[str, Any]]:
        return self.provider().instances()

    def identifiers(self) -> dict[str, str]:
        return {name: instance["InstanceId"] for name, instance in self.instances().items()}

    def vpcs(self) -> list[dict[str, Any]]:
        return self.ec2.describe_vpcs(Filters=[{"Name": "isDefault", "Values": ["false"]}])["Vpcs"]

    def network_is_being_created(self) -> bool:
        """The VPC exists and is in Terraform's state: Terraform now waits 10 s for the VPC's DNS settings."""
        found = self.vpcs()
        if not found:
            return False
        names = self.ec2.describe_vpc_attribute(VpcId=found[0]["VpcId"], Attribute="enableDnsHostnames")
        return bool(names["EnableDnsHostnames"]["Value"])

    def group(self) -> dict[str, Any]:
        (found,) = self.ec2.describe_security_groups(Filters=[{"Name": "group-name", "Values": [ENV]}])[
            "SecurityGroups"
        ]
        return found


@pytest.fixture(scope="module")
def account(moto: Path, environment: Callable[..., Any]) -> Account:
    return Account(moto)
