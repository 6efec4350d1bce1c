"""The folder of Python packages that nodes install from: filled once by the controller, so nodes need no index.

It also serves sites without internet: copy the cache folder there.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from cluster.config import ROOT, versions
from cluster.errors import InfraError
from cluster.process import run_logged
from cluster.state import CACHE

LOCK = ROOT / "nodes.lock"


def wheelhouse_key() -> str:
    digest = hashlib.sha256(LOCK.read_bytes())
    digest.update(versions()["horovod"].encode())
    return digest.hexdigest()[:12]


def folder() -> Path:
    return CACHE / "wheelhouse" / wheelhouse_key()


def fill(log: Path) -> Path:
    """Download what nodes.lock names, and Horovod's source, into the cache; return the folder."""
    target = folder()
    done = target / ".complete"
    if done.exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", target]
    locked = [*pip, "--require-hashes", "--only-binary=:all:", "--requirement", LOCK]
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
    done.touch()
    return target
