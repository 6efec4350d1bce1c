"""The section `slurm` of cluster.yml: an account on a Slurm cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cluster.core.sections import NodeNetwork, Section

SlurmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:&|*+-]+$")]
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+-]+(/[A-Za-z0-9_.+-]+)*$")]
SlurmOption = Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=[A-Za-z0-9_.,:/&|*+%-]+)?$")]
Folder = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9_.-]+){2,}$")]


class Slurm(Section):
    """Jobs of an ordinary user on an existing Slurm cluster."""

    login: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]*$", description="user@host, or local: here")]
    key: str | None = Field(default=None, description="private key for the login host; null: as your ssh chooses")
    folder: Folder = Field(description="new folder that the login host and all compute nodes see; destroy removes it")
    python: Folder = Field(description="Python on the compute nodes; it has torch and Horovod, unless build is true")
    build: bool = Field(default=False, description="build torch and Horovod into folder, by a job at deploy")
    subnets: dict[str, NodeNetwork] = Field(
        default={}, description="fabric -> its addresses on compute nodes; a fabric without one uses the default route"
    )
    partition: SlurmName | None = Field(default=None, description="partition; null: the default one")
    account: SlurmName | None = Field(default=None, description="account to charge")
    qos: SlurmName | None = Field(default=None, description="quality of service")
    constraint: SlurmName | None = Field(default=None, description="features that nodes must have")
    reservation: SlurmName | None = Field(default=None, description="reservation")
    minutes: Annotated[int, Field(ge=5, le=10080, description="time limit of a job")] = 60
    options: list[SlurmOption] = Field(default=[], description="more options of sbatch, such as --mem=0")
    modules: list[ModuleName] = Field(default=[], description="environment modules to load in a job")
    requeues: Annotated[int, Field(ge=0, le=20, description="how often a job may be requeued")] = 2
    poll_seconds: Annotated[
        float, Field(ge=0.2, le=60, strict=False, description="interval between looks at the queue")
    ] = 5
