"""What this machine runs: containers and networks of all local clusters with their owners, and its routes.

A container or network belongs to the state folder in its label, not to the name of a cluster. Standard library only:
node.py runs once per node.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from cluster.core import files, root
from cluster.core.errors import InfraError

Network4 = ipaddress.IPv4Network

# Labels: the name of the cluster, the state folder that owns it, and a node's name with a digest of what cannot change
# while it lives.
CLUSTER, OWNER, FINGERPRINT = "horovod-cluster", "horovod-cluster-state", "horovod-cluster-node"
SEEDS = "seeds"
SEED = "/var/lib/horovod-cluster-seed"
# A VPN may route everything, or all of 10.0.0.0/8. A network of ours is more specific and wins.
SHORTEST_ROUTE = 9


@dataclass(frozen=True)
class Container:
    name: str
    cluster: str
    owner: str
    state: str
    since: int
    fingerprint: str
    image: str

    @property
    def node(self) -> str:
        return self.name.removeprefix(f"{self.cluster}-")


@dataclass(frozen=True)
class Network:
    """cluster and owner are empty for a network that no cluster made."""

    name: str
    cluster: str
    owner: str
    subnets: tuple[Network4, ...]


@dataclass(frozen=True)
class Route:
    subnet: Network4
    device: str


@dataclass(frozen=True)
class Machine:
    containers: tuple[Container, ...]
    networks: tuple[Network, ...]
    # Without the routes to the bridges of these networks.
    routes: tuple[Route, ...]
    # Of all containers, also those that no cluster made.
    names: frozenset[str]


def owner_of(state_dir: str | Path) -> str:
    return str(Path(state_dir).resolve())


def podman(*args: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
    conf = (env or os.environ).get("CONTAINERS_CONF")
    sudo = root.sudo("podman", *([f"CONTAINERS_CONF={conf}"] if conf else []))
    try:
        done = subprocess.run([*sudo, "podman", *args], capture_output=True, text=True, env=env)
    except FileNotFoundError:
        raise InfraError("podman: not found; run `make setup`") from None
    if check and done.returncode:
        raise InfraError(f"podman {args[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


class Row(TypedDict):
    """A container, as podman ps prints it."""

    Id: str
    Names: list[str]
    Labels: dict[str, str] | None
    Mounts: list[str] | None
    State: str
    StartedAt: int
    ImageID: str


class Mount(TypedDict):
    Source: str
    Destination: str


class Inspected(TypedDict):
    Id: str
    Mounts: list[Mount]


class Range(TypedDict):
    subnet: str


class NetworkRow(TypedDict):
    name: str
    labels: NotRequired[dict[str, str] | None]
    subnets: NotRequired[list[Range] | None]


class RouteRow(TypedDict):
    dst: str
    dev: NotRequired[str]


def look(env: Mapping[str, str] | None = None) -> Machine:
    rows = container_rows(env)
    nodes = containers(rows, env)
    found = networks(nodes, env)
    bridged = {subnet for network in found for subnet in network.subnets}
    names = frozenset(name for row in rows for name in row["Names"])
    return Machine(nodes, found, tuple(route for route in routes() if route.subnet not in bridged), names)


def container_rows(env: Mapping[str, str] | None = None, *filters: str) -> list[Row]:
    words = (f"--filter={one}" for one in filters)
    return files.answer(podman("ps", "-a", "--format=json", *words, env=env) or "[]", "podman ps", list[Row])


def containers(rows: list[Row], env: Mapping[str, str] | None = None) -> tuple[Container, ...]:
    """The nodes among these containers."""
    # A container that somebody runs from a node image inherits the builder's labels, but has no seed.
    nodes = [row for row in rows if SEED in (row["Mounts"] or []) and CLUSTER in labels(row)]
    owners = seed_owners([row["Id"] for row in nodes if not declared_owner(row)], env)
    return tuple(
        Container(
            name=row["Names"][0],
            cluster=labels(row)[CLUSTER],
            owner=declared_owner(row) or owners.get(row["Id"], ""),
            state=row["State"],
            since=row["StartedAt"],
            fingerprint=own_fingerprint(row),
            image=row["ImageID"],
        )
        for row in nodes
    )


def networks(nodes: tuple[Container, ...], env: Mapping[str, str] | None = None) -> tuple[Network, ...]:
    listed = podman("network", "ls", "--format=json", env=env) or "[]"
    rows = files.answer(listed, "podman network ls", list[NetworkRow])
    return tuple(read_network(row, nodes) for row in rows)


def container(name: str) -> Container | None:
    return next(iter(containers(container_rows(None, f"name=^{name}$"))), None)


def network(name: str, cluster: str) -> Network | None:
    nodes = containers(container_rows(None, f"label={CLUSTER}={cluster}"))
    return next((one for one in networks(nodes) if one.name == name), None)


def labels(row: Row) -> dict[str, str]:
    return row["Labels"] or {}


def own_fingerprint(row: Row) -> str:
    """Without the name that it starts with: a container also inherits its image's labels, which are the builder's."""
    name, _, digest = labels(row).get(FINGERPRINT, "").partition(" ")
    return digest if name == row["Names"][0] else ""


def declared_owner(row: Row) -> str:
    return labels(row).get(OWNER, "") if own_fingerprint(row) else ""


def seed_owners(identifiers: list[str], env: Mapping[str, str] | None) -> dict[str, str]:
    """Owners of nodes that an earlier version made: the state folder that their seed is in."""
    if not identifiers:
        return {}
    inspected = podman("inspect", "--type=container", *identifiers, check=False, env=env) or "[]"
    found = files.answer(inspected, "podman inspect", list[Inspected])
    return {
        row["Id"]: owner_of(Path(mount["Source"]).parents[1])
        for row in found
        for mount in row["Mounts"]
        if mount["Destination"] == SEED
    }


def read_network(row: NetworkRow, nodes: tuple[Container, ...]) -> Network:
    given = row.get("labels") or {}
    cluster = given.get(CLUSTER, "")
    # A network of an earlier version belongs to the owner of its cluster's nodes.
    owner = given.get(OWNER) or next((one.owner for one in nodes if cluster and one.cluster == cluster), "")
    subnets = (ipaddress.ip_network(one["subnet"]) for one in row.get("subnets") or [])
    return Network(row["name"], cluster, owner, tuple(one for one in subnets if isinstance(one, Network4)))


def routes() -> list[Route]:
    """IPv4 networks that this machine has an interface in or a route to."""
    done = subprocess.run(["ip", "-json", "-4", "route", "show"], capture_output=True, text=True)
    found = []
    for row in files.answer(done.stdout or "[]", "ip route", list[RouteRow]):
        if row["dst"] != "default":
            subnet = Network4(row["dst"])
            if subnet.prefixlen >= SHORTEST_ROUTE and "dev" in row:
                found.append(Route(subnet, row["dev"]))
    return found
