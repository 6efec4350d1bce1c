"""shared-storage forget: the server of the share ends on the node that serves it. The calls of gluster are recorded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cluster.core.config import ROOT

SCRIPT = ROOT / "roles/shared_storage/files/shared-storage"


@pytest.fixture
def forget(tmp_path: Path):
    gluster = tmp_path / "bin/gluster"
    gluster.parent.mkdir()
    gluster.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    gluster.chmod(0o755)
    text = SCRIPT.read_text().replace("/etc/horovod-cluster", str(tmp_path))
    script = tmp_path / "shared-storage"
    script.write_text(text.replace("/run/shared-storage", str(tmp_path / "mounted")))
    script.chmod(0o755)

    def run(backend: str, data: str) -> list[str]:
        (tmp_path / "storage").write_text(f"BACKEND={backend}\nSERVER=head\nWHERE={tmp_path}/share\nDATA={data}\n")
        path = f"{gluster.parent}:{os.environ['PATH']}"
        subprocess.run([script, "forget"], check=True, env={**os.environ, "PATH": path})
        calls = tmp_path / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    return run


def test_volume_is_stopped_before_its_definition_is_deleted(forget) -> None:
    assert forget("glusterfs", "/srv/share/glusterfs") == [
        "--mode=script volume stop share force",
        "--mode=script volume delete share",
    ]


@pytest.mark.parametrize(("backend", "data"), [("glusterfs", ""), ("nfs", "/srv/share/nfs"), ("existing", "")])
def test_nothing_ends_where_no_volume_is_served(forget, backend: str, data: str) -> None:
    assert forget(backend, data) == []
