"""What differs between kinds of nodes: one module per provider, chosen by `provider` in cluster.yml."""

from __future__ import annotations

from cluster.config import Cluster
from cluster.providers.aws import Aws
from cluster.providers.baremetal import Baremetal
from cluster.providers.base import Provider
from cluster.providers.gpulab import OnGpulab
from cluster.providers.local import Local
from cluster.providers.virtualwall import OnVirtualWall
from cluster.state import State

PROVIDERS: dict[str, type[Provider]] = {
    "aws": Aws,
    "baremetal": Baremetal,
    "gpulab": OnGpulab,
    "local": Local,
    "virtualwall": OnVirtualWall,
}


def provider(state: State, cluster: Cluster) -> Provider:
    return PROVIDERS[cluster.provider](state, cluster)
