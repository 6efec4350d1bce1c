"""The folders of Python packages that nodes install from: filled once by the controller, so nodes need no index.

They also serve sites without internet: copy the cache folder there.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from cluster.config import ROOT, versions
from cluster.errors import InfraError
from cluster.process import run_logged
from cluster.state import CACHE

# role -> what it installs
LOCKS = {"horovod": ROOT / "nodes.lock", "jupyterlab": ROOT / "jupyter.lock"}


def locks(roles: Iterable[str]) -> dict[str, Path]:
    return {role: LOCKS[role] for role in roles if role in LOCKS}


def folder(role: str) -> Path:
    digest = hashlib.sha256(LOCKS[role].read_bytes())
    if role == "horovod":
        digest.update(versions()["horovod"].encode())
    return CACHE / "wheelhouse" / digest.hexdigest()[:12]


def fill(roles: Iterable[str], log: Path) -> dict[str, Path]:
    """Download what the locks of these roles name, and Horovod's source, into the cache; return role -> folder."""
    return {role: fill_one(role, lock, log) for role, lock in locks(roles).items()}


def fill_one(role: str, lock: Path, log: Path) -> Path:
    target = folder(role)
    done = target / ".complete"
    if done.exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", target]
    locked = [*pip, "--require-hashes", "--only-binary=:all:", "--requirement", lock]
    if role == "horovod":
        fill_horovod(target, pip, locked, log)
    else:
        run_logged(locked, log, os.environ, "pip download")
    done.touch()
    return target


def fill_horovod(target: Path, pip: list[str | Path], locked: list[str | Path], log: Path) -> None:
    pinned = versions()
    try:
        run_logged(locked, log, os.environ, "pip download")
    except InfraError:
        # Not every pip knows where CPU builds of PyTorch are.
        run_logged([*locked, "--extra-index-url", pinned["torch_cpu_index"]], log, os.environ, "pip download")
    source = target / f"horovod-{pinned['horovod']}.tar.gz"
    run_logged(
        [*pip, "--no-deps", "--no-binary=horovod", f"horovod=={pinned['horovod']}"], log, os.environ, "pip download"
    )
    if hashlib.sha256(source.read_bytes()).hexdigest() != pinned["horovod_sha256"]:
        source.unlink()
        raise InfraError("horovod: the downloaded source does not match versions.yml horovod_sha256")
