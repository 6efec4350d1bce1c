"""cluster.yml: read once, completed with every default, and checked. Terraform, Ansible and bench get the result."""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import Field, model_validator

from cluster.core import files, paths, prices, sections
from cluster.core.contract import Contract, ExecutorName, Fabric, Node, Storage
from cluster.core.errors import UserError
from cluster.core.sections import Section, Subnet
from cluster.core.slurm_section import Slurm

ROOT = paths.ROOT
MAX_NODES = 64
# A shorter prefix counts as the whole internet: 0.0.0.0/1 and 128.0.0.0/1 together are all of it.
SHORTEST_PREFIX = 8
# Of existing machines with `rate_gbps: auto`, for plans before the first deploy.
ASSUMED_GBPS = 10.0


class Release(NamedTuple):
    """An operating system of nodes. The controller may have another Python."""

    system: str
    title: str
    python: str


RELEASES = {
    "bookworm": Release("debian", "Debian 12", "3.11.2"),
    "trixie": Release("debian", "Debian 13", "3.13.5"),
    "jammy": Release("ubuntu", "Ubuntu 22.04", "3.10.12"),
    "noble": Release("ubuntu", "Ubuntu 24.04", "3.12.3"),
}
PYTHONS = {name: release.python for name, release in RELEASES.items()}


class Cluster(Section):
    """The cluster you want."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,19}$", description="prefix of all names: a-z, 0-9 and -")]
    provider: Literal["local", "aws", "baremetal", "virtualwall", "gpulab", "slurm"] = Field(
        description="where nodes run; each provider but local has a section of its name"
    )
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES, description="number of nodes: one head, the others are workers")]
    os_release: Literal["bookworm", "trixie", "jammy", "noble"] = Field(
        default="bookworm", description="release of all nodes: Debian 12 or 13, Ubuntu 22.04 or 24.04"
    )
    networks: sections.Networks | None = None
    admin_cidrs: Annotated[list[Subnet], Field(min_length=1, description="networks that may reach SSH and JupyterLab")]
    allow_world_open: bool = Field(default=False, description="allow admin_cidrs to be the whole internet")
    ports: sections.Ports = sections.Ports()
    features: sections.Features = sections.Features()
    storage: sections.Storage = sections.Storage()
    jupyterlab: sections.JupyterLab = sections.JupyterLab()
    fabrics: Annotated[
        dict[str, sections.Fabric], Field(min_length=1, description="name -> network for training traffic")
    ]
    active_fabric: str = Field(description="fabric that a new cluster is configured for")
    gpus_per_node: Annotated[int, Field(ge=0, le=16, description="real GPUs in each node; bench can emulate some")] = 0
    gpu_model: str = Field(default="none", description="GPU model, such as v100")
    aws: sections.Aws | None = None
    baremetal: sections.Baremetal | None = None
    virtualwall: sections.VirtualWall | None = None
    gpulab: sections.Gpulab | None = None
    kubernetes: sections.Kubernetes | None = None
    slurm: Slurm | None = None

    @model_validator(mode="after")
    def consistent(self) -> Cluster:
        if self.provider == "local" and not self.networks:
            raise ValueError("cluster.networks: missing; give management and fabric a network each")
        if self.provider == "local" and self.gpus_per_node:
            fix = "remove it; bench emulates GPUs on local nodes (device: emulated:p100 in a plan)"
            raise ValueError(f"gpus_per_node: {self.gpus_per_node}, but nodes of provider local have no GPUs; {fix}")
        if self.provider != "local" and getattr(self, self.provider) is None:
            raise ValueError(f"{self.provider}: missing; provider {self.provider} needs a section of that name")
        if self.baremetal and self.nodes > len(self.baremetal.hosts):
            raise ValueError(f"nodes: {self.nodes}, but baremetal.hosts has {len(self.baremetal.hosts)}; add hosts")
        if self.baremetal and self.baremetal.networks.keys() != self.fabrics.keys():
            raise ValueError("baremetal.networks: give each of fabrics an interface and a subnet, and no other")
        if self.features.slurm and (self.gpulab or self.slurm):
            raise ValueError(
                f"features.slurm: {self.provider} has its own queue, and no nodes to install on; remove it"
            )
        if self.slurm and (unknown := self.slurm.subnets.keys() - self.fabrics.keys()):
            raise ValueError(f"slurm.subnets: {', '.join(unknown)}: not one of fabrics; correct the name")
        possible = {"local": ("glusterfs", "none"), "gpulab": ("none",), "slurm": ("none",)}.get(self.provider)
        if possible and self.storage.backend not in possible:
            fix = f"write {' or '.join(possible)}"
            raise ValueError(f"storage.backend: provider {self.provider} cannot have {self.storage.backend}; {fix}")
        if self.networks:
            sections.check_ranges("networks", self.networks.model_dump(), self.nodes)
        if self.virtualwall:
            if self.virtualwall.lans.keys() != self.fabrics.keys():
                known = ", ".join(self.fabrics)
                raise ValueError(f"virtualwall.lans: give each of the fabrics {known} a network, and no other")
            sections.check_ranges("virtualwall.lans", self.virtualwall.lans, self.nodes)
        if self.active_fabric not in self.fabrics:
            known = ", ".join(self.fabrics)
            raise ValueError(f"active_fabric: unknown fabric {self.active_fabric!r}; choose one of {known}")
        for key, fabric in self.fabrics.items():
            if not re.fullmatch(r"[a-z0-9]+", key):
                raise ValueError(f"fabrics.{key}: use lower-case letters and digits only")
            if fabric.transport == "efa" and self.provider != "aws":
                raise ValueError(f"fabrics.{key}.transport: only provider aws has efa; write verbs or tcp")
            # The bridge between containers has no link rate of its own.
            if self.provider == "local" and "shaped" not in fabric.model_fields_set:
                fabric.shaped = True
            if fabric.rate_gbps == "auto" and (fabric.shaped or self.provider not in ("aws", "baremetal")):
                why = (
                    "a shaped fabric is limited to a number" if fabric.shaped else "only aws and baremetal find it out"
                )
                raise ValueError(f"fabrics.{key}.rate_gbps: auto: {why}; write the rate in Gbit/s")
            if fabric.rate_gbps == "auto" and (most := self.assumed_rate(fabric)) > sections.FASTEST_GBPS:
                why = f"the nodes have {most:g} Gbit/s on several cards"
                raise ValueError(f"fabrics.{key}.rate_gbps: auto: {why}; write the rate of one, at most 800")
        for cidr in self.admin_cidrs:
            if self.provider == "aws" and ":" in cidr:
                raise ValueError(f"admin_cidrs: {cidr} is IPv6, which the EC2 network has not; write an IPv4 network")
            if ipaddress.ip_network(cidr).prefixlen < SHORTEST_PREFIX and not self.allow_world_open:
                fix = "name the networks you work from, or set allow_world_open: true"
                raise ValueError(f"admin_cidrs: {cidr} opens SSH to the world; {fix}")
        return self

    @property
    def executor(self) -> ExecutorName:
        """As terraform/modules/contract and terraform/<provider> decide it."""
        return "gpulab" if self.gpulab else "slurm" if self.slurm or self.features.slurm else "ssh"

    def gpus(self) -> list[int]:
        """GPUs of each node, the head first."""
        if self.baremetal:
            return [host.gpus for host in self.baremetal.hosts[: self.nodes]]
        each, head = self.gpus_per_node, self.gpus_per_node
        if self.aws:
            each = prices.types()[self.aws.instance_type].gpus
            head = prices.types()[self.aws.head_type or self.aws.instance_type].gpus
        return [head, *[each] * (self.nodes - 1)]

    def text(self) -> str:
        """The completed cluster.yml."""
        return yaml.safe_dump({"cluster": self.model_dump(mode="json")}, sort_keys=False)

    def with_rates(self, found: Mapping[str, float]) -> Cluster:
        """With a number where cluster.yml says `rate_gbps: auto`: the one that was found, or else an assumption."""
        changed = {
            name: fabric.model_copy(update={"rate_gbps": found.get(name) or self.assumed_rate(fabric)})
            for name, fabric in self.fabrics.items()
            if fabric.rate_gbps == "auto"
        }
        return self.model_copy(update={"fabrics": {**self.fabrics, **changed}})

    def assumed_rate(self, fabric: sections.Fabric) -> float:
        if not self.aws:
            return ASSUMED_GBPS
        # terraform/aws gives nodes more than one card only in a subnet that exists, and TCP uses the first one.
        all_cards = fabric.transport == "efa" and self.aws.subnet_id
        kinds = [prices.types()[one] for one in {self.aws.instance_type, self.aws.head_type or self.aws.instance_type}]
        return min(one.gbps if all_cards else one.card_gbps for one in kinds)

    def planned(self) -> Contract:
        """The contract that a deploy would give, without addresses: plans are checked against it before a deploy."""
        gpus = self.gpus()
        if self.gpulab and self.gpulab.mode == "1xN":
            gpus = [sum(gpus)]
        names = ["head", *(f"w{number}" for number in range(1, len(gpus)))]
        nodes = {
            name: Node(
                index=index,
                role="worker" if index else "head",
                gpus=gpus[index],
                gpu_model=self.gpu_model,
            )
            for index, name in enumerate(names)
        }
        fabrics = {
            name: Fabric(**one.model_dump(include={"rate_gbps", "transport", "shaped"}))
            for name, one in self.with_rates({}).fabrics.items()
        }
        return Contract(
            name=self.name,
            provider=self.provider,
            executor=self.executor,
            nodes=nodes,
            fabrics=fabrics,
            active_fabric=self.active_fabric,
            storage=Storage(backend=self.storage.backend, server="", path=self.storage.path),
        )

    def most_nodes(self) -> int:
        """How far the cluster can be scaled."""
        return len(self.baremetal.hosts) if self.baremetal else MAX_NODES


class ClusterFile(Section):
    """A cluster.yml: what docs/cluster.schema.json is made from."""

    cluster: Cluster


def env_dir(env: str) -> Path:
    known = sorted(p.parent.parent.parent.name for p in ROOT.glob("inventories/*/group_vars/all/cluster.yml"))
    if env not in known:
        raise UserError(f"ENV={env}: no such environment; choose one of {', '.join(known)}")
    return ROOT / "inventories" / env


def cluster_file(env: str) -> Path:
    return env_dir(env) / "group_vars/all/cluster.yml"


def load(env: str, nodes: int | None = None) -> Cluster:
    """inventories/<env>/group_vars/all/cluster.yml, completed; nodes overrides its count."""
    return read(cluster_file(env), nodes)


def read(path: Path, nodes: int | None = None) -> Cluster:
    label = str(path.relative_to(ROOT))
    values = files.mapping(path, label).get("cluster")
    if not isinstance(values, dict):
        raise UserError(f"{label}: cluster: missing; the file holds one mapping named cluster")
    if nodes is not None:
        values["nodes"] = nodes
    rename_transports(values, label)
    return files.validate(Cluster, values, label, "cluster")


def rename_transports(values: dict[str, Any], label: str) -> None:
    """Accept the transport names of earlier versions, with a hint."""
    fabrics = values.get("fabrics")
    new = {"rdma": "efa", "verbs": "efa"} if values.get("provider") == "aws" else {"rdma": "verbs"}
    for name, fabric in fabrics.items() if isinstance(fabrics, dict) else ():
        old = fabric.get("transport") if isinstance(fabric, dict) else None
        if isinstance(old, str) and old in new:
            print(f"{label}: cluster.fabrics.{name}.transport: {old} is now {new[old]}; write that", file=sys.stderr)
            fabric["transport"] = new[old]


def versions() -> dict[str, str]:
    """versions.yml, and torch from the files that uv reads."""
    found = {"torch": pinned_torch("nodes.in"), "torch_cuda12": pinned_torch("cuda12.override")}
    return {**files.mapping(ROOT / "versions.yml")["versions"], **found}


def pinned_torch(name: str) -> str:
    torch = re.search(r"^torch==(\S+)$", files.text(ROOT / "requirements" / name), re.MULTILINE)
    if not torch:
        raise UserError(f"requirements/{name}: torch: missing; pin it as torch==VERSION")
    return torch[1]


@cache
def layout() -> Mapping[str, str]:
    """Accounts and folders on a node; Ansible gets the same as the variable `layout`."""
    return MappingProxyType(files.mapping(Path(__file__).parent / "layout.yml")["layout"])
