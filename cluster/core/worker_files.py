"""bench/worker as an archive, named by its content: what is copied to nodes and into the training image."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import bench.worker

WORKER = Path(bench.worker.__file__).parent


def archive() -> tuple[str, bytes]:
    """The worker's files as a tar, and a name made of their content."""
    files = [WORKER.parent / "__init__.py", *sorted(WORKER.glob("*.py"))]
    digest = hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:12]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in files:
            tar.add(path, arcname=str(path.relative_to(WORKER.parent.parent)), filter=_plain)
    return digest, buffer.getvalue()


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    info.mode = 0o644
    return info
