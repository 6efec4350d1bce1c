"""What differs between kinds of nodes: one module per provider, chosen by `provider` in cluster.yml."""

from __future__ import annotations

from cluster.config import Cluster
from cluster.providers.aws import Aws
from cluster.providers.base import Provider
from cluster.providers.local import Local
from cluster.state import State

PROVIDERS: dict[str, type[Provider]] = {"aws": Aws, "local": Local}


def provider(state: State, cluster: Cluster) -> Provider:
    return PROVIDERS[cluster.provider](state, cluster)
