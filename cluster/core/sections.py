"""The sections of a cluster.yml: what each may hold. cluster/core/config.py checks them as a whole."""

from __future__ import annotations

import ipaddress
import re
from itertools import combinations
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from cluster.core import prices


def _subnet(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError(f"{error}; write a network such as 10.77.0.0/24") from None
    return value


Subnet = Annotated[str, AfterValidator(_subnet)]


def _address(value: str) -> str:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise ValueError(f"{value!r} is not an IP address") from None
    return value


Address = Annotated[str, AfterValidator(_address)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Networks(Section):
    management: Subnet
    fabric: Subnet


class Ports(Section):
    ssh: Annotated[int, Field(ge=1, le=65535)] = 22
    jupyter: Annotated[int, Field(ge=1, le=65535)] = 8888


class Fabric(Section):
    rate_gbps: Annotated[float, Field(gt=0, le=800, strict=False)]
    transport: Literal["tcp", "verbs"] = "tcp"
    shaped: bool = False


class Features(Section):
    """Roles that a cluster may have or not: the names stand in ansible/roles.yml. Off means nothing is installed."""

    data: bool = False
    jupyterlab: bool = False
    monitoring: bool = False
    gpu: bool = False
    containers: bool = False


class JupyterLab(Section):
    """The certificate that the cluster's JupyterLab shows; without one, deploy makes one."""

    certificate: str | None = Field(default=None, description="PEM file on this machine, with its chain")
    key: str | None = Field(default=None, description="PEM file of its private key, without a password")

    @model_validator(mode="after")
    def both(self) -> JupyterLab:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("give certificate and key, or neither")
        return self


# Folders a share cannot take the place of, and those with something of the system in them.
TAKEN = {"home", "media", "mnt", "opt", "srv", "tmp", "var"}
SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "root", "run", "sbin", "sys", "usr"}


def _share_path(value: str) -> str:
    parts = value.split("/")[1:]
    if not re.fullmatch(r"(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+", value):
        raise ValueError(f"{value!r} is not an absolute path of letters, digits and _ . -; write one such as /shared")
    if parts[0] in SYSTEM or (len(parts) == 1 and parts[0] in TAKEN):
        raise ValueError(f"{value!r} belongs to the system; write a folder of its own such as /shared")
    return value


class Storage(Section):
    """A folder that all nodes see. none: there is none, and nothing of it is installed."""

    backend: Literal["none", "glusterfs", "nfs", "existing"] = "none"
    path: Annotated[str, AfterValidator(_share_path)] = "/shared"


def _instance_type(value: str) -> str:
    if value not in prices.types():
        known = ", ".join(prices.types())
        raise ValueError(f"{value!r} is not in cluster/core/instances.yml; choose one of {known}, or add it there")
    return value


InstanceType = Annotated[str, AfterValidator(_instance_type)]


class Ami(Section):
    """The machine image: an id, or the newest with this owner and name."""

    id: Annotated[str, Field(pattern=r"^ami-[0-9a-f]+$")] | None
    owner: str
    name: str


class Aws(Section):
    """Nodes on EC2. Every field stands in cluster.yml: Terraform reads them there."""

    region: Annotated[str, Field(pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$")]
    zone: str | None
    network: Subnet | None
    subnet_id: Annotated[str, Field(pattern=r"^subnet-[0-9a-f]+$")] | None
    instance_type: InstanceType
    head_type: InstanceType | None
    ami: Ami
    root_gb: Annotated[int, Field(ge=30, le=16384)]
    scratch: bool
    interface: str | None
    placement_group: bool
    spot: bool
    data_bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{2,62}$")] | None
    owner: Annotated[str, Field(min_length=1)]
    expires_hours: Annotated[int, Field(ge=1)]
    budget_usd: Annotated[float, Field(gt=0)]

    @model_validator(mode="after")
    def one_network(self) -> Aws:
        if (self.network is None) == (self.subnet_id is None):
            raise ValueError("aws.network: give it, or subnet_id of a subnet that exists, and null for the other")
        return self


class MetalNetwork(Section):
    """Where a fabric is on the hosts: the same card on all of them."""

    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,15}$")]
    subnet: Subnet


class Host(Section):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
    address: Address
    fabric_addresses: dict[str, Address]
    gpus: Annotated[int, Field(ge=0, le=16)]
    gpu_model: str
    host_key: Annotated[str, Field(pattern=r"^ssh-ed25519 [A-Za-z0-9+/=]+( .*)?$")] | None = None


class Baremetal(Section):
    """Hosts that exist; the first is the head. Terraform reads these fields in cluster.yml too."""

    user: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]*$")]
    key: str | None
    jump_host: str | None
    networks: dict[str, MetalNetwork]
    hosts: Annotated[list[Host], Field(min_length=1)]

    @model_validator(mode="after")
    def consistent(self) -> Baremetal:
        names = [host.name for host in self.hosts]
        if len(set(names)) < len(names):
            raise ValueError("baremetal.hosts: two have the same name")
        for host in self.hosts:
            if host.fabric_addresses.keys() != self.networks.keys():
                wanted = ", ".join(self.networks)
                raise ValueError(f"baremetal.hosts: {host.name} needs an address on each of {wanted}, and no other")
            for fabric, address in host.fabric_addresses.items():
                if ipaddress.ip_address(address) not in ipaddress.ip_network(self.networks[fabric].subnet):
                    raise ValueError(f"baremetal.hosts: {host.name}: {address} is not in the subnet of {fabric}")
        return self


Urn = Annotated[str, Field(pattern=r"^urn:publicid:IDN\+[^+\s]+\+[a-z]+\+\S+$")]


class VirtualWall(Section):
    """An experiment on the imec Virtual Wall: bare metal, one LAN per fabric."""

    backend: Literal["jfed", "slices"]
    project: Annotated[str, Field(min_length=1)]
    lans: dict[str, Subnet] = Field(description="fabric -> the addresses of its LAN")
    hardware_type: Annotated[str, Field(pattern=r"^\S+$")]
    disk_image: Annotated[str, Field(min_length=1)]
    ssh_key: str = Field(description="private key whose public half your account has on the testbed")
    jump_host: str | None = Field(default=None, description="user@host to go through; SLICES names its own")
    hours: Annotated[int, Field(ge=1, le=2160)] = 4
    ready_minutes: Annotated[int, Field(ge=1, le=240)] = 30
    # jFed
    component_manager: Urn | None = None
    pem: str | None = None
    password_file: str | None = None
    jar: str | None = None
    # SLICES
    site: str | None = None

    @model_validator(mode="after")
    def complete(self) -> VirtualWall:
        needed = ("component_manager", "pem", "jar") if self.backend == "jfed" else ("site",)
        for name in needed:
            if not getattr(self, name):
                raise ValueError(f"{name}: missing; backend {self.backend} needs it")
        return self

    def fit(self, fabrics: dict[str, Fabric], nodes: int) -> None:
        """Hold the LANs against the rest of cluster.yml."""
        if self.lans.keys() != fabrics.keys():
            raise ValueError(f"virtualwall.lans: give each of the fabrics {', '.join(fabrics)} a network, and no other")
        for a, b in combinations(self.lans, 2):
            if ipaddress.ip_network(self.lans[a]).overlaps(ipaddress.ip_network(self.lans[b])):
                raise ValueError(f"virtualwall.lans.{b}: {self.lans[b]} overlaps {a}; give each its own range")
        for name, subnet in self.lans.items():
            if ipaddress.ip_network(subnet).num_addresses < nodes + 20:
                raise ValueError(f"virtualwall.lans.{name}: {subnet} is too small for {nodes} nodes; use a /24")


class Gpulab(Section):
    """Jobs on imec GPULab."""

    project: Annotated[str, Field(min_length=1)]
    pem: str = Field(description="login certificate, from the account portal")
    password_file: str | None = None
    image: str = Field(description="container image made by `make training-image` and pushed where GPULab can pull it")
    mode: Literal["1xN", "Nx1"] = Field(default="Nx1", description="one job with N GPUs, or N jobs with one GPU each")
    storage: Annotated[str, Field(pattern=r"^/\S+$")] = "/project_ghent"
    cluster_id: Annotated[int, Field(ge=1)] | None = None
    cpus_per_gpu: Annotated[int, Field(ge=1, le=64)] = 4
    memory_gb_per_gpu: Annotated[int, Field(ge=1, le=512)] = 16
    minutes: Annotated[int, Field(ge=1, le=10080)] = Field(default=60, description="longest time a job may run")
    start_minutes: Annotated[int, Field(ge=1, le=1440)] = Field(
        default=30, description="how long to wait for all jobs of a set to run"
    )
    poll_seconds: Annotated[float, Field(ge=0.1, le=15, strict=False)] = 5
