"""HOROVOD_WHEEL=: a wheel that does not fit the nodes is refused in one line, before anything is created."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from cluster import cli, horovod_wheel
from cluster.core import config
from cluster.core.errors import UserError

VERSIONS = config.versions()
NAME = f"horovod-{VERSIONS['horovod']}-cp311-cp311-linux_x86_64.whl"


def make_wheel(folder: Path, name: str = NAME, torch: str = VERSIONS["torch"], mpi: bytes = horovod_wheel.MPI) -> Path:
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("horovod/metadata.json", json.dumps({"pytorch": torch}))
        wheel.writestr("horovod/torch/mpi_lib_v2.cpython-311-x86_64-linux-gnu.so", b"\x7fELF\0" + mpi)
    return folder / name


def test_a_wheel_of_the_same_versions_is_accepted(tmp_path, monkeypatch):
    wheel = make_wheel(tmp_path, torch=f"{VERSIONS['torch']}+cpu")
    monkeypatch.setenv("HOROVOD_WHEEL", str(wheel))
    assert horovod_wheel.given(config.load("local")) == str(wheel)


def test_gpus_before_turing_need_a_wheel_for_the_torch_of_cuda_12(tmp_path, monkeypatch):
    cluster = config.load("virtualwall")
    assert cluster.gpu_model == "gtx1080"
    monkeypatch.setenv("HOROVOD_WHEEL", str(make_wheel(tmp_path, torch=f"{VERSIONS['torch_cuda12']}+cu126")))
    assert horovod_wheel.given(cluster)
    monkeypatch.setenv("HOROVOD_WHEEL", str(make_wheel(tmp_path)))
    with pytest.raises(UserError, match=f"the nodes have {VERSIONS['torch_cuda12']}"):
        horovod_wheel.given(cluster)


def test_without_the_variable_no_wheel_is_given(monkeypatch):
    monkeypatch.delenv("HOROVOD_WHEEL", raising=False)
    assert horovod_wheel.given(config.load("local")) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": NAME.replace("311", "313")}, f"the nodes need {NAME}"),
        ({"name": NAME.replace(VERSIONS["horovod"], "0.27.0")}, f"the nodes need {NAME}"),
        ({"torch": "2.5.1"}, "compiled for torch 2.5.1"),
        ({"mpi": b"libmpi.so.12\0"}, "compiled without OpenMPI 4"),
    ],
)
def test_a_wheel_of_another_python_torch_or_mpi_is_refused(tmp_path, changes, reason):
    with pytest.raises(UserError, match=reason):
        horovod_wheel.check(make_wheel(tmp_path, **changes), "3.11.2", VERSIONS["torch"])


def test_a_broken_or_missing_wheel_stops_a_deploy_with_one_line(tmp_path, monkeypatch, capsys):
    for content in (None, b"not a zip file"):
        if content:
            (tmp_path / NAME).write_bytes(content)
        monkeypatch.setenv("HOROVOD_WHEEL", str(tmp_path / NAME))
        assert cli.main(["--env", "local", "deploy"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
