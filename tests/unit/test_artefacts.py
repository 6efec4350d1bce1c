"""The list for sites without internet access is complete and has the versions in use."""

import json
import re
from pathlib import Path

import jinja2
import pytest
import yaml

from cluster import artefacts, cli, image, roles, wheelhouse
from cluster.core import config
from cluster.core.state import State


@pytest.fixture
def rows(capsys, monkeypatch):
    # Without a node image, as on a machine before its first deploy.
    monkeypatch.setattr(artefacts.image, "exists", lambda *_: False)
    assert cli.main(["artefacts", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_locked_package_is_listed_with_its_checksums(rows):
    wheels = [row for row in rows if row["kind"] == "wheel"]
    for name in ("controller.lock", "nodes.lock"):
        text = (config.ROOT / "requirements" / name).read_text()
        always = set(re.findall(r"^([A-Za-z0-9_.-]+)==\S+ \\$", text, re.MULTILINE))
        assert len(always) > 20
        assert always <= {row["name"] for row in wheels if row["for"] == artefacts.LOCKS[name]}
    assert all(sum_.startswith("sha256:") for row in wheels for sum_ in row["checksums"])
    assert all(row["checksums"] for row in wheels)


def test_packages_of_other_pythons_and_systems_are_left_out(rows):
    names = [(row["name"], row["for"]) for row in rows if row["kind"] == "wheel"]
    assert ("pywin32", "this machine") not in names
    assert not [name for name, where in names if where == "nodes" and name.startswith("nvidia-")]
    (torch,) = [row for row in rows if (row["name"], row["for"]) == ("torch", "nodes")]
    assert torch["version"].endswith("+cpu")


def test_horovod_source_has_the_enforced_checksum(rows):
    pinned = config.versions()
    found = next(row for row in rows if row["kind"] == "file" and row["name"] == "horovod")
    assert (found["version"], found["checksums"]) == (pinned["horovod"], [f"sha256:{pinned['horovod_sha256']}"])


def test_debian_packages_of_base_roles_and_setup_are_listed(rows):
    names = {row["name"] for row in rows if row["kind"] == "package"}
    assert {"systemd", "libopenmpi-dev", "nftables", "iperf3", "podman", "mmdebstrap"} <= names


def test_disabled_roles_are_left_out(rows, capsys, monkeypatch):
    assert "nginx" in {row["name"] for row in rows}
    load = config.load
    off = {"features": load("local").features.model_copy(update={"data": False})}
    monkeypatch.setattr(config, "load", lambda env: load(env).model_copy(update=off))
    assert cli.main(["artefacts", "--json"]) == 0
    assert "nginx" not in {row["name"] for row in json.loads(capsys.readouterr().out)}


def test_packages_in_blocks_and_behind_variables_are_found():
    block = [
        {"block": [{"ansible.builtin.apt": {"name": ["a", "b"]}}]},
        {"ansible.builtin.apt": {"update_cache": True}},
    ]
    assert roles.apt_tasks(block) == [["a", "b"], []]
    assert "hwloc-nox" in roles.packages("common")


def test_images_and_drivers_of_nvidia_are_listed(rows):
    pinned = config.versions()
    (image,) = [row for row in rows if row["kind"] == "image"]
    assert f"{image['name']}:{image['version']}" == pinned["dcgm_exporter"]
    versions = {row["name"]: row["version"] for row in rows if row["name"].startswith("nvidia_")}
    assert versions["nvidia_driver"] == pinned["nvidia_driver"]


@pytest.mark.parametrize(
    ("role", "variable", "names"),
    [
        ("horovod", "horovod_lock", ("horovod", "horovod-cuda", "horovod-cuda12")),
        ("cuda_nccl", "cuda_nccl_lock", ("nccl", "nccl-cuda12")),
        ("jupyterlab", "jupyterlab_lock", ("jupyterlab",)),
    ],
)
def test_roles_install_from_the_locks_that_the_controller_downloads(role, variable, names):
    folder = config.ROOT / "roles" / role
    template = yaml.safe_load((folder / "defaults/main.yml").read_text())[variable]
    made = {
        Path(jinja2.Template(template).render(locks=variables["locks"], horovod_device=device)).resolve()
        for device in ("cpu", "cuda")
        for variables in (image.node_variables(State(env), config.load(env)) for env in ("aws", "virtualwall"))
    }
    assert made == {wheelhouse.LOCKS[name] for name in names}
    assert all(path.is_file() for path in made)
