"""The provider class for each value of `provider` in cluster.yml."""

from __future__ import annotations

from cluster.core.config import Cluster
from cluster.core.state import State
from cluster.providers.aws.provider import Aws
from cluster.providers.baremetal.provider import Baremetal
from cluster.providers.base import Provider
from cluster.providers.gpulab.provider import Gpulab
from cluster.providers.local.provider import Local
from cluster.providers.slurm.provider import Slurm
from cluster.providers.virtualwall.provider import VirtualWall

PROVIDERS: dict[str, type[Provider]] = {
    "aws": Aws,
    "baremetal": Baremetal,
    "gpulab": Gpulab,
    "local": Local,
    "slurm": Slurm,
    "virtualwall": VirtualWall,
}


def provider(state: State, cluster: Cluster) -> Provider:
    return PROVIDERS[cluster.provider](state, cluster)
