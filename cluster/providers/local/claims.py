"""Whether a cluster's name and subnets are free on this machine, who has them otherwise, and which subnets are free."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.core import config
from cluster.core.config import ROOT, Cluster
from cluster.core.errors import UserError
from cluster.core.state import State
from cluster.providers.local.machine import Machine, Network4, owner_of
from cluster.providers.neighbours import deployed, environment_of

# Where free subnets are looked for. The tests of this project use others.
POOLS = ("10.96.0.0/11", "172.16.0.0/12", "192.168.0.0/16")


@dataclass(frozen=True)
class Claim:
    """A subnet that is in use, and the words that say by whom."""

    subnet: Network4
    holder: str


def configured() -> list[Cluster]:
    """The clusters of all environments of this checkout, deployed or not; files with errors are left out."""
    found = []
    for path in sorted(ROOT.glob("inventories/*/group_vars/all/cluster.yml")):
        try:
            found.append(config.read(path))
        except UserError:
            continue
    return found


def claims(here: Machine, own: str, name: str = "") -> list[Claim]:
    """Subnets that others use: networks of podman, deployed environments, interfaces and routes.

    A network of an earlier version has no owner once its nodes are gone. It belongs to the cluster that it names.
    """
    found = [
        Claim(subnet, environment_of(network.owner) if network.owner else f"the podman network {network.name}")
        for network in here.networks
        if network.owner != own and (network.owner or not name or network.cluster != name)
        for subnet in network.subnets
    ]
    for owner, cluster in deployed().items():
        if owner != own:
            found += [Claim(subnet, environment_of(owner)) for subnet in subnets(cluster)]
    return found + [Claim(route.subnet, f"this machine's interface {route.device}") for route in here.routes]


def subnets(cluster: Cluster) -> list[Network4]:
    return [ipaddress.IPv4Network(text) for text in cluster.networks.model_dump().values()] if cluster.networks else []


def free_subnets(lengths: Iterable[int], taken: Iterable[Network4]) -> list[Network4]:
    """Subnets with these prefix lengths that overlap neither the taken ones nor each other."""
    used, found = list(taken), []
    for length in lengths:
        pools = (ipaddress.IPv4Network(text) for text in POOLS)
        candidates = (one for pool in pools if pool.prefixlen <= length for one in pool.subnets(new_prefix=length))
        chosen = next((one for one in candidates if not any(one.overlaps(other) for other in used)), None)
        if chosen is None:
            raise UserError(f"no free subnet of /{length} in {', '.join(POOLS)}; remove networks that nothing uses")
        found.append(chosen)
        used.append(chosen)
    return found


def advise(here: Machine, cluster: Cluster) -> list[Network4]:
    """Free subnets of the sizes that the cluster has."""
    taken = [claim.subnet for claim in claims(here, "")]
    taken += [subnet for one in configured() for subnet in subnets(one)]
    return free_subnets((subnet.prefixlen for subnet in subnets(cluster)), taken)


def name_holder(here: Machine, name: str, own: str) -> str:
    """Who else has a cluster, a node or a network of this name; "" if nobody."""
    owners = {one.owner for one in here.containers if one.cluster == name}
    owners |= {one.owner for one in here.networks if one.cluster == name}
    if others := sorted(owners - {"", own}):
        return environment_of(others[0])
    for owner, cluster in deployed().items():
        if owner != own and cluster.provider == "local" and cluster.name == name:
            return environment_of(owner)
    mine = {one.name for one in here.containers if one.owner == own}
    ours = {one.name for one in here.networks if one.cluster == name}
    nodes = {f"{name}-head", *(f"{name}-w{number}" for number in range(1, config.MAX_NODES))}
    if found := sorted(nodes & here.names - mine):
        return f"the podman container {found[0]}"
    networks = {one.name for one in here.networks} & {f"{name}-management", f"{name}-fabric"} - ours
    return f"the podman network {sorted(networks)[0]}" if networks else ""


def check(here: Machine, state: State, cluster: Cluster) -> None:
    """Refuse a name or a subnet that something else on this machine uses."""
    own = owner_of(state.dir)
    if holder := name_holder(here, cluster.name, own):
        free = " and ".join(map(str, advise(here, cluster)))
        fix = f"write another name and free subnets such as {free}; `make env NAME=...` makes such a copy"
        raise UserError(f"cluster.name: {cluster.name} is in use by {holder}; {fix}")
    taken = claims(here, own, cluster.name)
    for field, text in cluster.networks.model_dump().items() if cluster.networks else ():
        wanted = ipaddress.IPv4Network(text)
        for claim in taken:
            if wanted.overlaps(claim.subnet):
                free = " and ".join(map(str, advise(here, cluster)))
                what = f"{wanted} is in use by {claim.holder}"
                what += "" if claim.subnet == wanted else f" ({claim.subnet})"
                raise UserError(f"cluster.networks.{field}: {what}; free subnets: {free}")
