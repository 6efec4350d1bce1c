"""Settings that send a launch over its fabric, whatever the files on the nodes say: those follow the active fabric.

They are the same on every node. bench/worker/fabric.py adds the names of each node's cards.
"""

from __future__ import annotations

from cluster.core.contract import TransportName
from cluster.tuning import Tuning

# A name in NCCL_NET makes NCCL fail where that network does not work, instead of using another one.
NCCL_NETWORKS: dict[TransportName, str] = {"tcp": "Socket", "verbs": "IB", "efa": "AWS Libfabric"}


def mca(transport: TransportName, subnet: str, cuda: bool) -> dict[str, str]:
    """OpenMPI's parameters. With GPUs on EFA, MPI only starts the ranks, and TCP is enough for that."""
    control = {"btl_tcp_if_include": subnet, "oob_tcp_if_include": subnet}
    match transport:
        case "verbs":
            return {**control, "pml": "ucx", "osc": "ucx", "btl": "self,vader"}
        case "efa" if not cuda:
            return {**control, "pml": "cm", "mtl": "ofi", "mtl_ofi_provider_include": "efa", "btl": "self,vader"}
    return {**control, "pml": "ob1", "osc": "^ucx", "btl": "tcp,self,vader"}


def nccl(transport: TransportName, settings: Tuning) -> dict[str, str]:
    values = {"NCCL_NET": NCCL_NETWORKS[transport], "NCCL_IB_DISABLE": "0" if transport == "verbs" else "1"}
    if transport == "efa":
        values["FI_PROVIDER"] = "efa"
    if transport == "tcp" and settings.nccl_threads and settings.nccl_sockets:
        values |= {
            "NCCL_SOCKET_NTHREADS": str(settings.nccl_threads),
            "NCCL_NSOCKS_PERTHREAD": str(settings.nccl_sockets),
        }
    return values
