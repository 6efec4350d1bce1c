"""The sections of a cluster.yml: what each may hold. cluster/config.py checks them as a whole."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


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
