"""`cluster clean`: remove the cached images and packages that nothing uses; say what stays, and why."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from cluster import wheelhouse
from cluster.core import config, files
from cluster.core.config import ROOT
from cluster.core.errors import InfraError, UserError
from cluster.core.state import CACHE
from cluster.providers import neighbours
from cluster.providers.local import machine
from cluster.providers.local.machine import Machine, podman
from cluster.providers.local.provider import podman_settings

PREFIX = "localhost/horovod-cluster-"


def run(env: str) -> None:
    config.env_dir(env)
    with no_build(), podman_settings() as settings:
        here = machine.look(settings)
        removed = clean_images(here, settings) + clean_packages(here, settings)
    print("nothing to remove" if removed == 0 else f"{removed / 1e9:.1f} GB are free again")


@contextmanager
def no_build() -> Iterator[None]:
    """Nobody builds an image meanwhile. The lock is the one of cluster/image.py."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "image.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("clean: an image is being built from the cache; wait until that command ends") from None
        yield


class Image(TypedDict):
    """As podman images prints it."""

    Id: str
    Names: NotRequired[list[str]]
    ParentId: NotRequired[str]
    Size: int


class Inspected(TypedDict):
    Name: str
    Mounts: list[machine.Mount]


def clean_images(here: Machine, settings: Mapping[str, str]) -> int:
    """Remove node images, then base images. Never by force: that would also remove the containers that use them."""
    rows = files.answer(podman("images", "--format=json", env=settings) or "[]", "podman images", list[Image])
    images = [row for row in rows if any(name.startswith(PREFIX) for name in row.get("Names", []))]
    parents = {row.get("ParentId") for row in images}
    removed, kept = 0, set()
    for row in sorted(images, key=lambda one: one["Id"] in parents):
        name = row["Names"][0]
        if reason := image_user(here, row["Id"], settings) or (row["Id"] in kept and "a kept image is based on it"):
            kept |= {row["Id"], row.get("ParentId")}
            print(f"kept    {name}: {reason}")
            continue
        try:
            podman("rmi", *row["Names"], env=settings)
        except InfraError as error:
            kept |= {row["Id"], row.get("ParentId")}
            print(f"kept    {name}: {error}")
        else:
            removed += row["Size"]
            print(f"removed {name}")
    return removed


def image_user(here: Machine, image: str, settings: Mapping[str, str]) -> str:
    for container in here.containers:
        if container.image == image:
            return f"{neighbours.environment_of(container.owner)} runs {container.name} from it"
    others = [row["Names"][0] for row in machine.container_rows(settings) if row["ImageID"] == image]
    return f"the container {others[0]} uses it" if others else ""


def clean_packages(here: Machine, settings: Mapping[str, str]) -> int:
    """Remove downloads and compiled wheels. A deployed cluster may need them again to repair or add a node."""
    users = {one.owner for one in here.containers} | neighbours.deployed().keys()
    own = {f"{ROOT.resolve()}/.state/{Path(user).name}" for user in users}
    mounted = mounts(settings)
    current = {wheelhouse.folder(name, release) for name in wheelhouse.LOCKS for release in config.PYTHONS}
    removed = 0
    for folder in sorted(entries()):
        stale = folder.parent.name == "wheelhouse" and folder not in current and users <= own
        if folder in mounted:
            reason = f"the container {mounted[folder]} uses it"
        elif users and not stale:
            reason = f"{neighbours.environment_of(min(users))} is deployed and may need it for a repair"
        else:
            removed += size(folder)
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
            print(f"removed {folder}")
            continue
        print(f"kept    {folder}: {reason}")
    return removed


def entries() -> Iterator[Path]:
    """What is kept or removed as a whole: each wheelhouse, the wheels of each build, and each installed program."""
    for folder in CACHE.iterdir():
        if folder.is_dir():
            yield from folder.iterdir() if folder.name in ("wheelhouse", "horovod") else [folder]


def mounts(settings: Mapping[str, str]) -> dict[Path, str]:
    """Folders of this machine that are mounted in a container -> its name."""
    names = [row["Names"][0] for row in machine.container_rows(settings)]
    found: list[Inspected] = []
    if names:
        inspected = podman("inspect", "--type=container", *names, check=False, env=settings) or "[]"
        found = files.answer(inspected, "podman inspect", list[Inspected])
    return {Path(mount["Source"]): row["Name"] for row in found for mount in row["Mounts"]}


def size(path: Path) -> int:
    inside = path.rglob("*") if path.is_dir() else [path]
    return sum(one.stat().st_size for one in inside if one.is_file() and not one.is_symlink())
