"""The contract: the shape of every Terraform root's output `cluster`, which Ansible and bench rely on."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.core.errors import InfraError, UserError, one_line

# How a fabric sends bytes: sockets, RDMA over InfiniBand or RoCE, or Amazon's Elastic Fabric Adapter.
TransportName = Literal["tcp", "verbs", "efa"]
StorageBackend = Literal["none", "glusterfs", "nfs", "existing"]
# Who starts programs on the nodes. The rest of the product asks this, and never the provider's name.
ExecutorName = Literal["ssh", "gpulab", "slurm"]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Ssh(Part):
    user: str = Field(min_length=1)
    key: str
    known_hosts: str
    jump_host: str | None = None
    port: int = 22


class Node(Part):
    index: int
    role: Literal["head", "worker"]
    management_address: str | None = None
    fabric_addresses: dict[str, str] = {}
    gpus: int
    gpu_model: str
    # fabric -> its card on this node, where it differs from the fabric's `interface`
    interfaces: dict[str, str] = {}


class Fabric(Part):
    # "" until a deploy has found it
    interface: str = ""
    # None where nodes get an address of any network when they start
    subnet: str | None = None
    rate_gbps: float
    transport: TransportName
    shaped: bool


class Storage(Part):
    backend: StorageBackend
    server: str
    path: str


class Contract(Part):
    name: str
    provider: str
    executor: ExecutorName = "ssh"
    # None where nobody can log in to the nodes
    ssh: Ssh | None = None
    nodes: dict[str, Node]
    fabrics: dict[str, Fabric]
    active_fabric: str
    storage: Storage

    def ordered(self) -> list[tuple[str, Node]]:
        """Nodes by number: the order of a JSON object means nothing."""
        return sorted(self.nodes.items(), key=lambda item: item[1].index)

    @property
    def compute(self) -> list[str]:
        """The nodes that run ranks: those with GPUs, or all where none has any."""
        return [name for name, node in self.ordered() if node.gpus] or [name for name, _ in self.ordered()]

    @property
    def gpus_per_node(self) -> int:
        """GPUs that every node that computes has."""
        return min(self.nodes[name].gpus for name in self.compute)

    def interface(self, node: str, fabric: str | None = None) -> str:
        """The card of a fabric (the active one, if none is named) on a node."""
        fabric = fabric or self.active_fabric
        return self.nodes[node].interfaces.get(fabric, self.fabrics[fabric].interface)

    @property
    def login(self) -> Ssh:
        """How to log in to the nodes."""
        if self.ssh is None:
            raise UserError(f"provider {self.provider}: its nodes run jobs, and nobody can log in to them")
        return self.ssh

    def address(self, node: str) -> str:
        """Where a node's SSH server listens."""
        if (found := self.nodes[node].management_address) is None:
            raise UserError(f"provider {self.provider}: node {node} has no address to log in to")
        return found

    def subnet(self, fabric: str) -> str:
        """The address range of a fabric; "" if it has none."""
        return self.fabrics[fabric].subnet or ""

    @property
    def head(self) -> str:
        return next(name for name, node in self.ordered() if node.role == "head")


def parse(value: object) -> Contract:
    try:
        contract = Contract.model_validate(value)
    except ValidationError as error:
        raise InfraError(f"Terraform output {one_line(error, 'cluster')}; deploy again") from None
    heads = [name for name, node in contract.nodes.items() if node.role == "head"]
    if len(heads) != 1:
        raise InfraError(f"Terraform output cluster.nodes: expected one head, got {heads}")
    if contract.executor == "ssh" and contract.ssh is None:
        raise InfraError("Terraform output cluster.ssh: missing, but executor ssh logs in to the nodes; deploy again")
    return contract
