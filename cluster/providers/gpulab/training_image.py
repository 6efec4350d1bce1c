"""`make training-image`: the container image of GPULab jobs, built from the node image and bench/worker."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

from cluster import image
from cluster.core import worker_files
from cluster.core.config import ROOT, Cluster, layout
from cluster.core.process import run_logged
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.core.unpack import unpack


def name(cluster: Cluster, device: str = "cpu") -> str:
    """The tag contains the hashes of the node image and of the worker."""
    key = image.name(cluster, device).rpartition(":")[2]
    return f"localhost/horovod-cluster-training:{device}-{key}-{worker_files.digest()}"


def build(state: State, cluster: Cluster, progress: Progress, device: str = "cpu") -> str:
    target = name(cluster, device)
    if image.exists(state, target):
        return target
    base = image.ensure(state, cluster, progress, device)
    with tempfile.TemporaryDirectory() as tmp:
        context = Path(tmp)
        with tarfile.open(fileobj=io.BytesIO(worker_files.archive())) as tar:
            unpack(tar, context / "worker")
        run_logged(
            [
                *(*image.sudo(), "podman", "build", "--quiet", "--network=none", "--tag", target),
                *("--build-arg", f"BASE={base}", "--build-arg", f"EXPECTED={'NCCL' if device == 'cuda' else 'Gloo'}"),
                *("--build-arg", f"WORKER={layout()['worker']}", "--build-arg", f"VENV={layout()['venv']}"),
                *("--file", ROOT / "containers/training/Containerfile", context),
            ],
            state.log("training-image"),
            state.environment(),
            "podman build",
        )
    return target
