"""Settings for collectives: defaults per class of fabric, and what `make tune` found for this cluster.

inventories/<env>/tuning.yml holds what was found (fabric name -> settings) and overrides the defaults. The mpi and
horovod roles apply the settings of the active fabric; bench passes each launch the settings of its fabric.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from cluster.core import files
from cluster.core.config import ROOT
from cluster.core.contract import Fabric
from cluster.core.errors import UserError
from cluster.core.sections import Section

Algorithm = Literal["default", "recursive_doubling", "ring", "segmented_ring", "rabenseifner"]
# Their numbers in OpenMPI (coll_tuned_allreduce_algorithm).
NUMBERS: dict[Algorithm, int] = {"recursive_doubling": 3, "ring": 4, "segmented_ring": 5, "rabenseifner": 6}
RING_ALLGATHERV = "3"


class Tuning(Section):
    """The settings of one fabric."""

    model_config = ConfigDict(frozen=True)

    # CPU collective backend; ignored with NCCL. Gloo's ring keeps several segments in flight and reaches 96% of the
    # wire; OpenMPI's waits for each step and reaches 86%.
    engine: Literal["horovod-gloo", "horovod-mpi"] = "horovod-gloo"
    # Smaller messages use UNTUNED: Gloo's ring has more steps, and each costs a wake-up.
    small_below_bytes: Annotated[int, Field(ge=0)] = 1 << 20
    # Horovod's fusion buffer in MiB, and the period of its background loop.
    fusion_mb: Annotated[float, Field(gt=0, le=1024, strict=False)] = 128.0
    cycle_ms: Annotated[float, Field(gt=0, le=100, strict=False)] = 2.0
    # OpenMPI's all-reduce for messages from this size on and three processes or more; others use recursive doubling.
    algorithm: Algorithm = "ring"
    algorithm_from_bytes: Annotated[int, Field(ge=0)] = 65536
    segment_bytes: Annotated[int, Field(ge=0)] = 0
    # OpenMPI's socket buffers in bytes (0: tuned by the kernel), and connections between a pair of nodes.
    socket_bytes: Annotated[int, Field(ge=0)] = 0
    links: Annotated[int, Field(ge=1, le=8)] = 1
    eager_bytes: Annotated[int, Field(ge=1024, le=1 << 24)] = 65536
    # NCCL's threads per connection and connections per thread (sockets only); 0: as NCCL chooses.
    nccl_threads: Annotated[int, Field(ge=0, le=16)] = 1
    nccl_sockets: Annotated[int, Field(ge=0, le=16)] = 1


# The defaults of Horovod and OpenMPI: the baseline for tuning.
UNTUNED = Tuning(engine="horovod-mpi", algorithm="default", cycle_ms=1.0)


def for_size(chosen: Tuning, size: int) -> Tuning:
    """The settings for messages of this size, or for a model with so many bytes of gradients."""
    return UNTUNED if size < chosen.small_below_bytes else chosen


SHIPPED: dict[str, Tuning] = {
    "1G": Tuning(),
    "10G": Tuning(),
    # Transfers are short on these links, so the latency of small collectives counts: OpenMPI's is a quarter of Gloo's.
    # links=4 is common advice that we have not measured: one connection is said not to fill such a link.
    "25-100G TCP": Tuning(engine="horovod-mpi", algorithm="default", links=4, nccl_threads=4, nccl_sockets=4),
    "verbs": Tuning(engine="horovod-mpi", algorithm="default"),
}


def fabric_class(fabric: Fabric) -> str:
    if fabric.transport != "tcp":
        return "verbs"
    if fabric.rate_gbps <= 2:
        return "1G"
    return "10G" if fabric.rate_gbps <= 15 else "25-100G TCP"


def file(env: str) -> Path:
    return ROOT / "inventories" / env / "tuning.yml"


def load(env: str) -> dict[str, Tuning]:
    """The tuned settings of an environment; empty when `make tune` never ran."""
    path = file(env)
    if not path.exists():
        return {}
    content = files.mapping(path).get("tuning")
    if not isinstance(content, dict):
        raise UserError(f"{path.name}: not a tuning file; remove it and run `make tune ENV={env}`")
    return {name: files.validate(Tuning, values, path.name, f"tuning.{name}") for name, values in content.items()}


def choose(tuned: Mapping[str, Tuning], name: str, fabric: Fabric, provider: str) -> Tuning:
    """The tuned settings of a fabric, or the defaults of its class."""
    # NCCL recognizes the cards of EC2 and has its own number of sockets for them.
    own = {"nccl_threads": 0, "nccl_sockets": 0} if provider == "aws" else {}
    return tuned.get(name) or SHIPPED[fabric_class(fabric)].model_copy(update=own)


def mca(chosen: Tuning) -> dict[str, str]:
    """OpenMPI's parameters, which the mpi role writes for every MPI program on the cluster.

    A rules file selects the all-reduce by message size (see roles/mpi/templates/allreduce.rules.j2).
    """
    return {
        "btl_tcp_eager_limit": str(chosen.eager_bytes),
        "btl_tcp_links": str(chosen.links),
        "btl_tcp_sndbuf": str(chosen.socket_bytes),
        "btl_tcp_rcvbuf": str(chosen.socket_bytes),
    }


def all_reduce(chosen: Tuning, processes: int) -> Algorithm:
    """OpenMPI's all-reduce of a launch that pins it. Its own choice for large messages is Rabenseifner's."""
    if processes <= 2:
        # With two processes a ring waits on itself; recursive doubling sends the same bytes in one exchange.
        return "recursive_doubling"
    return "rabenseifner" if chosen.algorithm == "default" else chosen.algorithm


def launch_mca(chosen: Tuning, processes: int, pinned: bool = False) -> dict[str, str]:
    """OpenMPI's parameters for one launch: the number of processes is known and all messages are large.

    pinned: name the algorithm even where OpenMPI would choose one, so that the bytes on the wire are known.
    """
    if chosen.algorithm == "default" and not pinned:
        return {**mca(chosen), "coll_tuned_use_dynamic_rules": "0"}
    number = NUMBERS[all_reduce(chosen, processes)]
    rules = {"coll_tuned_use_dynamic_rules": "1", "coll_tuned_allreduce_algorithm": str(number)}
    if pinned:
        rules["coll_tuned_allgatherv_algorithm"] = RING_ALLGATHERV
    if chosen.segment_bytes:
        rules["coll_tuned_allreduce_algorithm_segmentsize"] = str(chosen.segment_bytes)
    return {**mca(chosen), **rules}


def role_variables(env: str, name: str, fabric: Fabric, provider: str) -> dict[str, object]:
    """Variables for the mpi and horovod roles."""
    chosen = choose(load(env), name, fabric, provider)
    return {"tuning": {**chosen.model_dump(), "number": NUMBERS.get(chosen.algorithm, 0), "mca": mca(chosen)}}
