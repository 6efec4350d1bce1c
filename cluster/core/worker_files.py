"""bench/worker as an archive to unpack in /opt/bench-worker, in a folder named by its content.

The folder has __main__.py, so `python FOLDER PROGRAM` runs a program of the worker and finds its modules.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import bench.worker
from cluster.core import ssh
from cluster.core.config import layout
from cluster.core.contract import Contract
from cluster.core.errors import InfraError

WORKER = Path(bench.worker.__file__).parent
ON_NODE = layout()["worker"]


@cache
def _files() -> dict[str, bytes]:
    paths = {"__main__.py": WORKER / "__main__.py", "bench/__init__.py": WORKER.parent / "__init__.py"}
    paths |= {f"bench/worker/{path.name}": path for path in sorted(WORKER.glob("*.py"))}
    return {name: path.read_bytes() for name, path in paths.items()}


@cache
def digest() -> str:
    return hashlib.sha256(b"".join(name.encode() + content for name, content in _files().items())).hexdigest()[:12]


def folder() -> str:
    """Where the worker's files are on a node."""
    return f"{ON_NODE}/{digest()}"


def archive(more: Mapping[str, bytes] | None = None) -> bytes:
    """A tar of the worker and of more files, by name in /opt/bench-worker."""
    files = {f"{digest()}/{name}": content for name, content in _files().items()} | dict(more or {})
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def install(contract: Contract, names: list[str], more: Mapping[str, bytes] | None = None) -> None:
    """Copy the worker and more files in parallel to these nodes, and to a head that only launches."""
    names = names if contract.head in contract.compute else [contract.head, *names]
    command = f"sudo mkdir -p {ON_NODE} && sudo tar -x -C {ON_NODE}"
    for node, done in ssh.run_on_all(contract, names, command, archive(more)).items():
        if done.returncode:
            raise InfraError(f"node {node}: cannot copy the worker: {done.stderr.strip()}; run `make doctor`")
