"""The sections of cluster.yml: their fields, defaults and limits. cluster/core/config.py checks them together."""

from __future__ import annotations

import ipaddress
import re
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core.core_schema import no_info_wrap_validator_function

from cluster.core import prices
from cluster.core.contract import StorageBackend, TransportName


def _network(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError(f"{error}; write a network such as 10.77.0.0/24") from None
    return value


def _node_network(value: str) -> str:
    network = ipaddress.ip_network(_network(value))
    if network.version != 4:
        raise ValueError(f"{value} is IPv6, which training does not use; write an IPv4 network")
    if network.is_loopback or network.is_multicast or network.is_link_local or network.is_unspecified:
        raise ValueError(f"{value} is reserved for another use; write a private network such as 10.77.0.0/24")
    return value


# A network of clients, and one in which nodes have addresses.
Subnet = Annotated[str, AfterValidator(_network)]
NodeNetwork = Annotated[str, AfterValidator(_node_network)]


def _address(value: str) -> str:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise ValueError(f"{value!r} is not an IP address") from None
    return value


Address = Annotated[str, AfterValidator(_address)]


def _auto(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return value if value == "auto" else check(value)


# From 1 Mbit/s to the fastest port that is sold.
FASTEST_GBPS = 800
RateGbps = Annotated[float, Field(ge=0.001, le=FASTEST_GBPS, strict=False)]
# A plain union would add the name of its member to the path of the field in errors.
RateOrAuto = Annotated[
    float | Literal["auto"],
    GetPydanticSchema(lambda _, make: no_info_wrap_validator_function(_auto, make(RateGbps))),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0.001, "maximum": FASTEST_GBPS}, {"const": "auto"}]}),
]


Port = Annotated[int, Field(ge=1, le=65535)]


def check_ranges(field: str, ranges: dict[str, str], nodes: int) -> None:
    """Networks in which nodes get addresses do not overlap and are large enough."""
    networks = {name: ipaddress.ip_network(text) for name, text in ranges.items()}
    for (a, first), (b, second) in combinations(networks.items(), 2):
        if first.overlaps(second):
            raise ValueError(f"{field}.{b}: {second} overlaps {field}.{a} {first}; give each its own range")
    for name, network in networks.items():
        if network.num_addresses < nodes + 20:
            raise ValueError(f"{field}.{name}: {network} is too small for {nodes} nodes; use a /24 or larger")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Networks(Section):
    """Networks of the local nodes, which must not overlap."""

    management: NodeNetwork = Field(description="network for SSH and JupyterLab; its first address is this machine")
    fabric: NodeNetwork = Field(description="network for training traffic, closed to everything else")


class Ports(Section):
    """TCP ports on the nodes."""

    ssh: Port = Field(default=22, description="port of the SSH server")
    jupyter: Port = Field(default=8888, description="port of JupyterLab on the head")

    @model_validator(mode="after")
    def different(self) -> Ports:
        if self.ssh == self.jupyter:
            raise ValueError(f"jupyter: {self.jupyter} is the port of SSH too; give each its own")
        return self


class Fabric(Section):
    """A network for training traffic."""

    rate_gbps: Annotated[
        RateOrAuto,
        Field(description="link rate of one node in Gbit/s; auto (not shaped): that of the cards or the instance type"),
    ]
    transport: TransportName = Field(default="tcp", description="tcp, verbs (InfiniBand, RoCE) or efa (AWS)")
    shaped: bool = Field(
        default=False, description="limit the interface to rate_gbps; default true with provider local"
    )


class Features(Section):
    """Optional roles, named in ansible/roles.yml. false removes the role."""

    data: bool = Field(default=False, description="image shards served over HTTP by the head")
    jupyterlab: bool = Field(default=False, description="JupyterLab on the head")
    monitoring: bool = Field(default=False, description="Prometheus and exporters")
    gpu: bool = Field(default=False, description="NVIDIA driver and NCCL, on nodes with GPUs")
    containers: bool = Field(default=False, description="podman, to train in containers")
    slurm: bool = Field(default=False, description="Slurm; sweeps and users share the nodes through its queue")


class JupyterLab(Section):
    """TLS certificate of JupyterLab. Without one, deploy creates a self-signed certificate."""

    certificate: str | None = Field(default=None, description="PEM file on this machine, with its chain")
    key: str | None = Field(default=None, description="PEM file of the private key, without a password")

    @model_validator(mode="after")
    def both(self) -> JupyterLab:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("give certificate and key, or neither")
        return self


# Folders that a share cannot replace, and folders of the operating system.
TAKEN = {"home", "media", "mnt", "opt", "srv", "tmp"}
SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "root", "run", "sbin", "sys", "usr"}
SYSTEM |= {"var"}
# Folders of the roles: a share would hide what is in them.
ROLES = {
    "/opt/bench-worker",
    "/opt/horovod",
    "/opt/jupyterlab",
    "/opt/nccl",
    "/opt/nccl-tests",
    "/srv/data",
    "/srv/share",
}


def _share_path(value: str) -> str:
    parts = value.split("/")[1:]
    if not re.fullmatch(r"(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+", value):
        raise ValueError(f"{value!r} is not an absolute path of letters, digits and _ . -; write one such as /shared")
    if parts[0] in SYSTEM or (len(parts) == 1 and parts[0] in TAKEN):
        raise ValueError(f"{value!r} belongs to the system; write a folder of its own such as /shared")
    if parts[0] == "home" and len(parts) == 2:
        raise ValueError(f"{value!r} may be the home of an account, with its keys; write another such as /shared")
    if f"/{'/'.join(parts[:2])}" in ROLES:
        raise ValueError(f"{value!r} would hide a folder that the nodes use; write another such as /shared")
    return value


class Storage(Section):
    """A folder that all nodes share."""

    backend: StorageBackend = Field(default="none", description="who serves it; existing: it is mounted already")
    path: Annotated[str, AfterValidator(_share_path)] = Field(default="/shared", description="mount point on the nodes")


def _instance_type(value: str) -> str:
    if value not in prices.types():
        known = ", ".join(prices.types())
        raise ValueError(f"{value!r} is not in cluster/core/instances.yml; choose one of {known}, or add it there")
    return value


InstanceType = Annotated[str, AfterValidator(_instance_type)]
ReservationId = Annotated[str, Field(pattern=r"^cr-[0-9a-f]+$")]
SubnetId = Annotated[str, Field(pattern=r"^subnet-[0-9a-f]+$")]
BucketName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{2,62}$")]


class Ami(Section):
    """The machine image: an id, or the newest image with this owner and name."""

    id: Annotated[str, Field(pattern=r"^ami-[0-9a-f]+$")] | None = Field(default=None, description="id of the image")
    owner: str = Field(default="136693071363", description="account that publishes the image; the default is Debian")
    name: str = Field(default="debian-12-amd64-*", description="name of the image, with wildcards")


class Aws(Section):
    """Nodes on EC2."""

    region: Annotated[str, Field(pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$", description="AWS region")]
    zone: str | None = Field(default=None, description="availability zone; null: one that offers the instance types")
    network: NodeNetwork | None = Field(default=None, description="of the VPC to create; not with subnet_id")
    subnet_id: SubnetId | None = Field(default=None, description="existing subnet that you reach; not with network")
    instance_type: InstanceType = Field(description="type of the nodes, from cluster/core/instances.yml")
    head_type: InstanceType | None = Field(default=None, description="type of the head; null: instance_type")
    ami: Ami = Ami()
    root_gb: Annotated[int, Field(ge=30, le=16384, description="size of the encrypted gp3 root volume")] = 100
    scratch: bool = Field(default=True, description="mount the instance-store disks, as one stripe, at /scratch")
    interface: str | None = Field(default=None, description="first network card; null: each node is asked")
    placement_group: bool = Field(default=True, description="place the workers close together")
    spot: bool = Field(default=False, description="spot instances: cheaper, but AWS may stop them")
    capacity_reservation: ReservationId | None = Field(
        default=None, description="capacity reservation or capacity block for the nodes of instance_type"
    )
    data_bucket: BucketName | None = Field(default=None, description="S3 bucket to create; destroy removes it")
    owner: Annotated[str, Field(min_length=1, description="value of the tag Owner on all resources")]
    expires_hours: Annotated[
        int, Field(ge=1, description="hours after which nodes end themselves; `make renew` extends")
    ] = 12
    idle_minutes: Annotated[int, Field(ge=5)] | None = Field(
        default=None, description="minutes without logins and load after which nodes end themselves; null: never"
    )
    budget_usd: Annotated[float, Field(gt=0, description="amount above which `make cost` warns")] = 50

    @model_validator(mode="after")
    def one_network(self) -> Aws:
        if (self.network is None) == (self.subnet_id is None):
            raise ValueError("aws.network: give network, or subnet_id of an existing subnet, but not both")
        if self.spot and self.capacity_reservation:
            raise ValueError("aws.spot: spot instances cannot use a capacity_reservation; remove one of them")
        return self


class MetalNetwork(Section):
    """Where a fabric is. Each host's interface is the one with the host's address."""

    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,15}$")] | None = Field(
        default=None, description="name of the interface, if it must be the same on all hosts"
    )
    subnet: NodeNetwork = Field(description="address range of the fabric")


HostKey = Annotated[str, Field(pattern=r"^ssh-ed25519 [A-Za-z0-9+/=]+( .*)?$")]


class Host(Section):
    """An existing machine."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,62}$", description="output of `hostname -s` on the host")]
    address: Address = Field(description="address of its SSH server")
    fabric_addresses: dict[str, Address] = Field(description="fabric -> address of the host on it")
    gpus: Annotated[int, Field(ge=0, le=16, description="number of GPUs")] = 0
    gpu_model: str = Field(default="none", description="GPU model, such as v100")
    host_key: HostKey | None = Field(default=None, description="public SSH host key; null: `make adopt` asks")


class Baremetal(Section):
    """Existing machines. The first host is the head."""

    user: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]*$", description="account with a key and passwordless sudo")]
    key: str | None = Field(default=None, description="private key for the hosts; null: `make adopt` creates one")
    jump_host: str | None = Field(default=None, description="user@host of an SSH jump host")
    networks: dict[str, MetalNetwork] = Field(description="fabric -> its subnet")
    hosts: Annotated[list[Host], Field(min_length=1, description="machines in order; `nodes` of them are used")]

    @model_validator(mode="after")
    def consistent(self) -> Baremetal:
        names = [host.name for host in self.hosts]
        if len(set(names)) < len(names):
            raise ValueError("baremetal.hosts: two hosts have the same name")
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

    backend: Literal["jfed", "slices"] = Field(description="tool that reserves the nodes")
    project: Annotated[str, Field(min_length=1, description="name of your project on the testbed")]
    lans: dict[str, NodeNetwork] = Field(description="fabric -> address range of its LAN")
    hardware_type: Annotated[str, Field(pattern=r"^\S+$", description="hardware type; with slices, the flavor")]
    disk_image: Annotated[str, Field(min_length=1, description="URN of the disk image")]
    ssh_key: str = Field(description="private key whose public half is in your testbed account")
    jump_host: str | None = Field(default=None, description="user@host of an SSH jump host; SLICES names its own")
    hours: Annotated[int, Field(ge=1, le=2160, description="hours until the experiment expires")] = 4
    ready_minutes: Annotated[int, Field(ge=1, le=240, description="longest wait until the nodes are ready")] = 30
    component_manager: Urn | None = Field(default=None, description="jFed: URN of the component manager")
    pem: str | None = Field(default=None, description="jFed: login certificate")
    password_file: str | None = Field(default=None, description="jFed: file with the password of the certificate")
    jar: str | None = Field(default=None, description="jFed: path of the experimenter CLI")
    site: str | None = Field(default=None, description="SLICES: site of the nodes")

    @model_validator(mode="after")
    def complete(self) -> VirtualWall:
        needed = ("component_manager", "pem", "jar") if self.backend == "jfed" else ("site",)
        for name in needed:
            if not getattr(self, name):
                raise ValueError(f"{name}: missing; backend {self.backend} needs it")
        return self


class Gpulab(Section):
    """Jobs on imec GPULab."""

    project: Annotated[str, Field(min_length=1, description="name of your GPULab project")]
    pem: str = Field(description="login certificate, from the account portal")
    password_file: str | None = Field(default=None, description="file with the password of the certificate")
    image: str = Field(description="container image made by `make training-image` and pushed where GPULab can pull it")
    mode: Literal["1xN", "Nx1"] = Field(default="Nx1", description="one job with N GPUs, or N jobs with one GPU each")
    storage: Annotated[str, Field(pattern=r"^/\S+$", description="storage path in a job")] = "/project_ghent"
    cluster_id: Annotated[int, Field(ge=1)] | None = Field(default=None, description="GPULab cluster; null: any")
    cpus_per_gpu: Annotated[int, Field(ge=1, le=64, description="CPU cores of a job per GPU")] = 4
    memory_gb_per_gpu: Annotated[int, Field(ge=1, le=512, description="memory of a job per GPU")] = 16
    minutes: Annotated[int, Field(ge=1, le=10080, description="time limit of a job")] = 60
    start_minutes: Annotated[int, Field(ge=1, le=1440, description="longest wait until all jobs of a set run")] = 30
    poll_seconds: Annotated[
        float, Field(ge=0.1, le=15, strict=False, description="interval between status requests")
    ] = 5


RESOURCE = r"^[a-z0-9.-]+/[a-zA-Z0-9._-]+$"
NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


class Kubernetes(Section):
    """Manifests for a cluster of somebody else's: `bench render kubernetes`. No provider needs it."""

    image: Annotated[str, Field(pattern=r"^[^@\s]+/[^@\s]+@sha256:[0-9a-f]{64}$")] = Field(
        description="training image in a registry, by digest: registry/name@sha256:..."
    )
    namespace: Annotated[str, Field(pattern=NAME, description="namespace of everything that is rendered")] = "default"
    gpu_resource: Annotated[str, Field(pattern=RESOURCE, description="resource name of one GPU")] = "nvidia.com/gpu"
    rdma_resource: Annotated[str, Field(pattern=RESOURCE)] | None = Field(
        default=None, description="resource name of one RDMA device, such as rdma/hca; null: TCP"
    )
    network: str | None = Field(default=None, description="second network (Multus: a NetworkAttachmentDefinition)")
    interface: Annotated[str, Field(pattern=r"^[a-z0-9.-]{1,15}$")] = Field(
        default="eth0", description="network card of a pod that carries gradients; net1 is the first of Multus"
    )
    shared_memory_gb: Annotated[int, Field(ge=1, le=4096, description="size of /dev/shm in a pod")] = 16
    cpus: Annotated[int, Field(ge=1, le=1024)] | None = Field(default=None, description="CPU cores of a pod")
    memory_gb: Annotated[int, Field(ge=1, le=65536)] | None = Field(default=None, description="memory of a pod")
    claim: Annotated[str, Field(pattern=NAME)] | None = Field(
        default=None, description="PersistentVolumeClaim (ReadWriteMany), mounted at /data"
    )
    pull_secret: Annotated[str, Field(pattern=NAME)] | None = Field(
        default=None, description="secret with the registry's password"
    )
    queue: Annotated[str, Field(pattern=NAME)] | None = Field(
        default=None, description="local queue of Kueue, which starts all pods together or none"
    )
    minutes: Annotated[int, Field(ge=1, le=43200, description="time limit of a run")] = 120
