"""Which build of torch and Horovod each node gets, and that the CUDA build is a CUDA build."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from cluster import image, wheelhouse
from cluster.core import config
from cluster.core.config import Cluster
from cluster.core.errors import InfraError
from cluster.providers.gpulab import training_image


def changed(env: str, **values: object) -> Cluster:
    return Cluster.model_validate(config.load(env).model_dump() | values)


def test_nodes_with_gpus_install_the_cuda_build() -> None:
    assert image.wheelhouses_of(config.load("local")) == ["horovod", "jupyterlab"]
    assert image.wheelhouses_of(config.load("aws")) == ["horovod-cuda", "nccl"]


def test_gpus_before_turing_get_the_build_for_cuda_12() -> None:
    assert image.wheelhouses_of(config.load("virtualwall")) == ["horovod-cuda12", "nccl-cuda12"]
    assert image.wheelhouses_of(config.load("gpulab")) == ["horovod-cuda12"]
    # What the nodes answered wins over the model in cluster.yml.
    assert image.wheelhouses_of(config.load("virtualwall"), "13") == ["horovod-cuda", "nccl"]


def test_head_without_a_gpu_installs_the_cpu_build() -> None:
    aws = config.load("aws").model_dump()["aws"] | {"head_type": "t3.medium"}
    found = changed("aws", aws=aws)
    assert found.gpus() == [0, 1, 1, 1]
    assert image.wheelhouses_of(found) == ["horovod", "horovod-cuda", "nccl"]


def test_only_hosts_that_are_used_count() -> None:
    metal = config.load("baremetal").model_dump()["baremetal"]
    metal["hosts"][0]["gpus"] = 0
    assert changed("baremetal", baremetal=metal, nodes=1).gpus() == [0]
    assert changed("baremetal", baremetal=metal, nodes=2).gpus() == [0, 1]


def test_images_for_cpus_and_for_gpus_have_different_names() -> None:
    cluster = config.load("gpulab")
    assert training_image.name(cluster, "cpu") != training_image.name(cluster, "cuda")
    # The CPU image is built on the local cluster's image, whatever the jobs request.
    local = config.load("local")
    alike = cluster.model_copy(update={"features": local.features, "storage": local.storage})
    assert image.name(alike, "cpu") == image.name(local)


def pins(lock: str) -> dict[str, str]:
    return {one.requirement.name: one.version for one in wheelhouse.packages(lock, "bookworm")}


def test_locks_agree() -> None:
    """All lock files have the same versions of torch, NCCL and CUDA."""
    cuda, nccl = pins("horovod-cuda"), pins("nccl")
    assert pins("horovod")["torch"].partition("+")[0] == cuda["torch"] == config.versions()["torch"]
    assert nccl.items() <= cuda.items()
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime"):
        assert cuda[name].startswith("13.0."), name


def test_locks_of_cuda_12_agree() -> None:
    """A program sees the same packages whichever stack its node has, but for CUDA and what comes with torch."""
    newer, older = pins("horovod-cuda"), pins("horovod-cuda12")
    assert older["torch"] == config.versions()["torch_cuda12"]
    assert pins("nccl-cuda12").items() <= older.items()
    for name in ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-runtime-cu12", "nvidia-cublas-cu12", "nvidia-cuda-cccl-cu12"):
        assert older[name].startswith("12.6."), name
    torch = {"torch", "triton"}
    common = {name for name in newer.keys() & older.keys() - torch if not name.startswith("nvidia-")}
    assert "numpy" in common
    assert {name: newer[name] for name in common} == {name: older[name] for name in common}


@pytest.mark.parametrize("release", ["jammy", "noble", "trixie"])
def test_every_release_has_locks_of_both_stacks_for_its_python(release: str) -> None:
    python = config.PYTHONS[release]
    for name, version in (("horovod-cuda", "torch"), ("horovod-cuda12", "torch_cuda12")):
        found = {one.requirement.name: one.version for one in wheelhouse.packages(name, release)}
        assert found["torch"] == config.versions()[version]
        assert (
            f"--python-version {'3.10.12' if release == 'jammy' else '3.11.2'} "
            in wheelhouse.lock(name, release).read_text().splitlines()[1]
        ), python


@pytest.mark.parametrize("content", ["torch/lib/libtorch_cuda.so", "torch/lib/libtorch_cpu.so"])
def test_cpu_build_of_torch_is_refused_where_cuda_is_needed(tmp_path: Path, content: str) -> None:
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(content, "")
    if content.endswith("cuda.so"):
        wheelhouse.check_cuda(tmp_path, "2.13.0")
    else:
        with pytest.raises(InfraError, match="without CUDA; give pip access to the public index"):
            wheelhouse.check_cuda(tmp_path, "2.13.0")
        assert not wheel.exists()
