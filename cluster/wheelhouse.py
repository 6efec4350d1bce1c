"""Wheelhouses: folders of Python packages that the controller downloads once, so that nodes need no package index.

A site without internet can use them too: copy the cache folder there.
"""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from cluster.core.config import ROOT, versions
from cluster.core.errors import InfraError
from cluster.core.process import run_logged
from cluster.core.state import CACHE

# wheelhouse -> its lock file
LOCKS = {
    "horovod": ROOT / "requirements/nodes.lock",
    "horovod-cuda": ROOT / "requirements/nodes-cuda.lock",
    "nccl": ROOT / "requirements/nccl.lock",
    "jupyterlab": ROOT / "requirements/jupyter.lock",
}


def folder(name: str) -> Path:
    digest = hashlib.sha256(LOCKS[name].read_bytes())
    if name.startswith("horovod"):
        digest.update(versions()["horovod"].encode())
    return CACHE / "wheelhouse" / digest.hexdigest()[:12]


def fill(names: Iterable[str], log: Path) -> dict[str, Path]:
    """Download the packages of these locks, and Horovod's source, into the cache; name -> folder."""
    return {name: fill_one(name, log) for name in names}


def fill_one(name: str, log: Path) -> Path:
    target = folder(name)
    done = target / ".complete"
    if done.exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", target]
    locked = [*pip, "--require-hashes", "--only-binary=:all:", "--requirement", LOCKS[name]]
    try:
        run_logged(locked, log, os.environ, "pip download")
    except InfraError:
        if name != "horovod":
            raise
        # Not every pip is configured with an index of CPU builds of PyTorch.
        run_logged([*locked, "--extra-index-url", versions()["torch_cpu_index"]], log, os.environ, "pip download")
    if name == "horovod-cuda":
        check_cuda(target, versions()["torch"])
    if name.startswith("horovod"):
        fill_source(target, [*pip, "--no-deps", "--no-binary=horovod"], log)
    done.touch()
    return target


def fill_source(target: Path, pip: list[str | Path], log: Path) -> None:
    pinned = versions()
    source = target / f"horovod-{pinned['horovod']}.tar.gz"
    run_logged([*pip, f"horovod=={pinned['horovod']}"], log, os.environ, "pip download")
    if hashlib.sha256(source.read_bytes()).hexdigest() != pinned["horovod_sha256"]:
        source.unlink()
        raise InfraError("horovod: the downloaded source does not match versions.yml horovod_sha256")


def check_cuda(target: Path, version: str) -> None:
    """Refuse a CPU build of the same version, which pip may find too."""
    for wheel in target.glob(f"torch-{version}*.whl"):
        with zipfile.ZipFile(wheel) as content:
            if not any(name.endswith("/libtorch_cuda.so") for name in content.namelist()):
                wheel.unlink()
                raise InfraError(f"{wheel.name}: torch without CUDA; give pip access to the public index")
