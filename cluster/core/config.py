"""What a cluster.yml may say, and the one-line errors for what it may not."""

from __future__ import annotations

import ipaddress
import re
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from cluster.core import paths, prices
from cluster.core.errors import UserError
from cluster.core.sections import (
    Aws,
    Baremetal,
    Fabric,
    Features,
    Gpulab,
    JupyterLab,
    Networks,
    Ports,
    Section,
    Storage,
    Subnet,
    VirtualWall,
)

ROOT = paths.ROOT
MAX_NODES = 64
# A shorter prefix than this is not somebody's network; halves of the world are the world too.
NARROWEST_WORLD = 8


class Cluster(Section):
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,19}$")]
    provider: Literal["local", "aws", "baremetal", "virtualwall", "gpulab"]
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)]
    os_release: Literal["bookworm", "trixie"] = "bookworm"
    networks: Networks | None = None
    admin_cidrs: Annotated[list[Subnet], Field(min_length=1)]
    allow_world_open: bool = False
    ports: Ports = Ports()
    features: Features = Features()
    storage: Storage = Storage()
    jupyterlab: JupyterLab = JupyterLab()
    fabrics: Annotated[dict[str, Fabric], Field(min_length=1)]
    active_fabric: str
    gpus_per_node: Annotated[int, Field(ge=0, le=16)] = 0
    gpu_model: str = "none"
    aws: Aws | None = None
    baremetal: Baremetal | None = None
    virtualwall: VirtualWall | None = None
    gpulab: Gpulab | None = None

    @model_validator(mode="after")
    def consistent(self) -> Cluster:
        if self.provider == "local" and not self.networks:
            raise ValueError("cluster.networks: missing; give management and fabric a network each")
        if self.provider != "local" and getattr(self, self.provider) is None:
            raise ValueError(f"{self.provider}: missing; provider {self.provider} needs a section of that name")
        if self.baremetal and self.nodes > len(self.baremetal.hosts):
            raise ValueError(f"nodes: {self.nodes} are asked for, but baremetal.hosts has {len(self.baremetal.hosts)}")
        if self.baremetal and self.baremetal.networks.keys() != self.fabrics.keys():
            raise ValueError("baremetal.networks: give interface and subnet of each of fabrics, and of no other")
        possible = {"local": ("glusterfs", "none"), "gpulab": ("none",)}.get(self.provider)
        if possible and self.storage.backend not in possible:
            fix = f"write {' or '.join(possible)}"
            raise ValueError(f"storage.backend: provider {self.provider} cannot have {self.storage.backend}; {fix}")
        networks = self.networks.model_dump() if self.networks else {}
        named = {key: ipaddress.ip_network(value) for key, value in networks.items()}
        for (a, net_a), (b, net_b) in combinations(named.items(), 2):
            if net_a.overlaps(net_b):
                raise ValueError(f"networks.{b}: {net_b} overlaps networks.{a} {net_a}; give each its own range")
        for key, net in named.items():
            if net.num_addresses < self.nodes + 20:
                raise ValueError(f"networks.{key}: {net} is too small for {self.nodes} nodes; use a /24 or larger")
        if self.virtualwall:
            self.virtualwall.fit(self.fabrics, self.nodes)
        if self.active_fabric not in self.fabrics:
            known = ", ".join(self.fabrics)
            raise ValueError(f"active_fabric: unknown fabric {self.active_fabric!r}; choose one of {known}")
        for key in self.fabrics:
            if not re.fullmatch(r"[a-z0-9]+", key):
                raise ValueError(f"fabrics.{key}: use lower-case letters and digits only")
        for cidr in self.admin_cidrs:
            if ipaddress.ip_network(cidr).prefixlen < NARROWEST_WORLD and not self.allow_world_open:
                fix = "name the networks you work from, or set allow_world_open: true"
                raise ValueError(f"admin_cidrs: {cidr} opens SSH to the world; {fix}")
        return self

    def gpus(self) -> list[int]:
        """GPUs of each node, the head's first, as far as cluster.yml tells."""
        if self.baremetal:
            return [host.gpus for host in self.baremetal.hosts[: self.nodes]]
        each, head = self.gpus_per_node, self.gpus_per_node
        if self.aws:
            each = prices.types()[self.aws.instance_type].gpus
            head = prices.types()[self.aws.head_type or self.aws.instance_type].gpus
        return [head, *[each] * (self.nodes - 1)]


def one_line(error: ValidationError, prefix: str) -> str:
    """The first problem of a ValidationError as 'where: what', with the path a user can search for."""
    first = error.errors()[0]
    where = ".".join([prefix, *(str(part) for part in first["loc"])])
    text = first["msg"].removeprefix("Value error, ")
    got = "" if first["type"] in ("missing", "value_error") else f", got {first['input']!r}"
    if first["type"] == "extra_forbidden":
        text, got = "unknown field; remove it or correct its spelling", ""
    return f"{where}: {text}{got}".replace("\n", " ")


def env_dir(env: str) -> Path:
    known = sorted(p.parent.parent.parent.name for p in ROOT.glob("inventories/*/group_vars/all/cluster.yml"))
    if env not in known:
        raise UserError(f"ENV={env}: no such environment; choose one of {', '.join(known)}")
    return ROOT / "inventories" / env


def cluster_file(env: str) -> Path:
    return env_dir(env) / "group_vars/all/cluster.yml"


def load(env: str, nodes: int | None = None) -> Cluster:
    """Read and check inventories/<env>/group_vars/all/cluster.yml; nodes overrides its count."""
    path = cluster_file(env)
    label = path.relative_to(ROOT)
    try:
        content: Any = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{label}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not isinstance(content.get("cluster"), dict):
        raise UserError(f"{label}: cluster: missing; the file holds one mapping named cluster")
    values = dict(content["cluster"])
    if nodes is not None:
        values["nodes"] = nodes
    try:
        return Cluster.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{label}: {one_line(error, 'cluster')}") from None


def versions() -> dict[str, str]:
    content: dict[str, dict[str, str]] = yaml.safe_load((ROOT / "versions.yml").read_text())
    return content["versions"]
