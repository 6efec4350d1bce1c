"""`cluster env`: a copy of an environment that can be deployed next to the original."""

from __future__ import annotations

import ipaddress
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

from cluster.core import config, files
from cluster.core.config import ROOT, Cluster
from cluster.core.errors import UserError
from cluster.core.state import State, write_file
from cluster.providers.local import claims
from cluster.providers.local.machine import owner_of
from cluster.providers.local.provider import look_here

NAME = re.compile(r"[a-z][a-z0-9-]{0,19}")
Field = tuple[str | int, ...]


def require(env: str) -> None:
    """Refuse an unknown environment before anything is written for it. One that is deployed may have lost its folder in
    inventories/ and can still be destroyed."""
    if Path(env).name != env or not State(env).cluster_file.exists():
        config.env_dir(env)


def run(name: str, source: str) -> None:
    folder, cluster = config.env_dir(source), config.load(source)
    if not NAME.fullmatch(name):
        raise UserError(f"NAME={name}: write a name of a-z, 0-9 and -, at most 20 characters, such as NAME={source}2")
    target = ROOT / "inventories" / name
    if target.exists():
        raise UserError(f"NAME={name}: inventories/{name} exists; choose another name")
    # Quoted if YAML reads the name as something else, such as no.
    changed: dict[Field, str] = {("name",): name if yaml.safe_load(name) == name else f'"{name}"'}
    if cluster.provider == "local":
        changed |= own_networks(name, cluster)
    path = config.cluster_file(source).relative_to(folder)
    text = replace_values(files.text(folder / path), changed)
    shutil.copytree(folder, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    write_file(target / path, text)
    (target / path).chmod(0o644)
    print(f"made inventories/{name} from inventories/{source}:")
    for field, value in changed.items():
        print(f"  {'.'.join(['cluster', *map(str, field)])}: {value}")
    print(f"next: make deploy ENV={name}")


def own_networks(name: str, cluster: Cluster) -> dict[Field, str]:
    """Fields of cluster.yml -> values: free subnets, and admin_cidrs at the same place in the new ones."""
    here = look_here()
    if holder := claims.name_holder(here, name, owner_of(State(name).dir)):
        raise UserError(f"NAME={name}: this cluster name is in use by {holder}; choose another name")
    old, new = claims.subnets(cluster), claims.advise(here, cluster)
    fields = type(cluster.networks).model_fields if cluster.networks else {}
    changed: dict[Field, str] = {("networks", field): str(subnet) for field, subnet in zip(fields, new, strict=True)}
    for index, text in enumerate(cluster.admin_cidrs):
        cidr = ipaddress.ip_network(text)
        for before, after in zip(old, new, strict=True):
            if cidr.version == before.version and cidr.subnet_of(before):
                moved = int(after.network_address) + int(cidr.network_address) - int(before.network_address)
                changed["admin_cidrs", index] = f"{ipaddress.ip_address(moved)}/{cidr.prefixlen}"
    return changed


def replace_values(text: str, changed: dict[Field, str]) -> str:
    """Replace these fields of `cluster`, and keep everything else as it is written, comments too."""
    places = dict(scalars(yaml.compose(text, Loader=yaml.SafeLoader), ()))
    for field in sorted(changed, key=lambda one: places["cluster", *one].start_mark.index, reverse=True):
        node = places["cluster", *field]
        start, end = node.start_mark.index, node.end_mark.index
        # A value that gets shorter or longer moves the comment behind it, up to one space.
        line_end = text.find("\n", end) if "\n" in text[end:] else len(text)
        value, rest = changed[field], text[end:line_end]
        if re.match(r" +#", rest):
            gap = len(rest) - len(rest.lstrip())
            rest = " " * max(1, gap + (end - start) - len(value)) + rest.lstrip()
        text = text[:start] + value + rest + text[line_end:]
    return text


def scalars(node: yaml.Node, path: Field) -> Iterator[tuple[Field, yaml.ScalarNode]]:
    """Every scalar of a document with its path."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from scalars(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from scalars(value, (*path, index))
    elif isinstance(node, yaml.ScalarNode):
        yield path, node
