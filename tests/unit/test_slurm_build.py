"""ENV=slurm with build: true: what travels to the cluster, and what its nodes need."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest

from bench.worker import slurm_build
from cluster.core.errors import InfraError
from cluster.core.slurm_section import Slurm
from cluster.providers.slurm import build
from cluster.providers.slurm.jobs import Jobs


def test_source_of_horovod_travels_with_the_edits_of_the_role(tmp_path: Path) -> None:
    contents: dict[str, str] = {}
    for file, old, _ in build.edits():
        contents[file] = contents.get(file, "") + f"{old}\n"
    source = tmp_path / "horovod-1.tar.gz"
    with tarfile.open(source, "w:gz") as tar:
        for name, text in {**contents, "setup.py": "kept"}.items():
            info = tarfile.TarInfo(f"horovod-1/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    with tarfile.open(fileobj=io.BytesIO(build.edited(source))) as tar:
        found = {one.name.partition("/")[2]: (tar.extractfile(one) or io.BytesIO()).read().decode() for one in tar}
    assert found["setup.py"] == "kept"
    for file, old, new in build.edits():
        assert new in found[file]
        assert old not in found[file].replace(new, "")
    contents["CMakeLists.txt"] = ""
    with tarfile.open(source, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("horovod-1/CMakeLists.txt"), io.BytesIO())
    with pytest.raises(InfraError, match="cannot patch"):
        build.edited(source)


def test_environment_that_was_built_replaces_the_python_of_jobs(tmp_path: Path) -> None:
    section = Slurm(login="local", folder="/scratch/me", python="/usr/bin/python3")
    assert Jobs(section, tmp_path, "none").python == "/usr/bin/python3"
    built = section.model_copy(update={"build": True})
    assert Jobs(built, tmp_path, "none").python == "/scratch/me/venv/bin/python"


def test_build_names_what_the_nodes_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"cluster\.slurm\.python is Python 3\.\d+, but the packages are for 2\.7"):
        slurm_build.check("2.7", compiles=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match=r"g\+\+ is missing on .*: name a module in cluster\.slurm\.modules"):
        slurm_build.check(".".join(map(str, sys.version_info[:2])), compiles=True)
