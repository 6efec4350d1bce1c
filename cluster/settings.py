"""The sections of a cluster.yml: what each may hold. cluster/config.py checks them as a whole."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from cluster import prices


def _subnet(value: str) -> str:
    try:
        ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError(f"{error}; write a network such as 10.77.0.0/24") from None
    return value


Subnet = Annotated[str, AfterValidator(_subnet)]


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


def _instance_type(value: str) -> str:
    if value not in prices.types():
        known = ", ".join(prices.types())
        raise ValueError(f"{value!r} is not in terraform/aws/instances.yml; choose one of {known}, or add it there")
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
