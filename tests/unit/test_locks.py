"""The locks hold for every Python of the controller and of the nodes."""

import importlib.metadata
import sys
import tomllib
import typing
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from cluster import cli, lifecycle, wheelhouse
from cluster.core import config, locks
from cluster.core.errors import UserError
from cluster.core.progress import Progress

# Debian 12's own, Ubuntu 24.04's, Debian 13's.
PYTHONS = ("3.11.2", "3.12.3", "3.13.5")
LOCKS = sorted((config.ROOT / "requirements").glob("*.lock"))


def problems(lock: Path, python: str, roots: list[str]) -> list[str]:
    """Why this Python cannot install roots from the lock alone, as far as the packages installed here tell."""
    locked = {canonicalize_name(one.requirement.name): one for one in locks.installed_by(python, lock)}
    here = {canonicalize_name(one.name): one for one in importlib.metadata.distributions()}
    found, seen, queue = [], set(), [("the project", Requirement(root)) for root in roots]
    while queue:
        parent, wanted = queue.pop()
        name = canonicalize_name(wanted.name)
        one = locked.get(name)
        if not one or not wanted.specifier.contains(one.version, prereleases=True):
            found.append(f"Python {python}: {parent} needs {wanted}, locked is {one and one.version}")
            continue
        package = here.get(name)
        if (name, *wanted.extras) in seen or not package or package.version != one.version:
            continue
        seen.add((name, *wanted.extras))
        if python not in SpecifierSet(package.metadata.get("Requires-Python", "")):
            found.append(f"{name}=={one.version} does not install on Python {python}")
        environments = [{**locks.environment(python), "extra": extra} for extra in ("", *wanted.extras)]
        for needed in map(Requirement, package.requires or []):
            if not needed.marker or any(map(needed.marker.evaluate, environments)):
                queue.append((name, needed))
    return found


def roots() -> list[str]:
    project = tomllib.loads((config.ROOT / "pyproject.toml").read_text())["project"]
    return (
        project["dependencies"]
        + project["optional-dependencies"]["dev"]
        + project["optional-dependencies"]["terraform"]
    )


@pytest.mark.parametrize("python", PYTHONS)
def test_the_controllers_lock_holds_for(python):
    assert problems(config.ROOT / "requirements/controller.lock", python, roots()) == []


def test_a_lock_that_one_python_cannot_install_is_found(tmp_path):
    """What the walk above must see: a package that is too new, one that is missing, one of another version."""
    text = (config.ROOT / "requirements/controller.lock").read_text()
    current = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    lock = tmp_path / "controller.lock"
    lock.write_text(text)
    assert "does not install on Python 3.8.0" in "\n".join(problems(lock, "3.8.0", roots()))
    lock.write_text(text.replace("\npydantic-core==", "\nother=="))
    assert "pydantic needs pydantic-core" in "\n".join(problems(lock, current, roots()))
    lock.write_text(text.replace("\nansible-core==2.", "\nansible-core==1."))
    assert "locked is 1." in "\n".join(problems(lock, current, roots()))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_lock_was_resolved_for_all_pythons_from_debian_12_on(lock):
    command = lock.read_text().splitlines()[1]
    # Ubuntu 22.04 has its own.
    oldest = "3.10.12" if lock.stem.endswith("-py310") else "3.11.2"
    assert f"--universal --python-version {oldest} " in command
    assert "--generate-hashes" in command


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_no_python_gets_two_versions_of_a_package(lock):
    for python in PYTHONS:
        names = [one.requirement.name for one in locks.installed_by(python, lock)]
        assert sorted(set(names)) == sorted(names)


def test_every_release_has_a_python():
    assert set(typing.get_args(config.Cluster.model_fields["os_release"].annotation)) == set(config.PYTHONS)


def test_packages_are_those_of_the_nodes_python_whatever_the_controllers(tmp_path, monkeypatch):
    lock = tmp_path / "some.lock"
    lock.write_text(
        "old==1 ; python_full_version < '3.12' \\\n    --hash=sha256:aa\n"
        "new==1 ; python_full_version >= '3.12' \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n    # via x\n"
        "windows==1 ; sys_platform == 'win32' \\\n    --hash=sha256:dd\n"
    )
    monkeypatch.setitem(wheelhouse.LOCKS, "jupyterlab", lock)
    monkeypatch.setattr(wheelhouse, "CACHE", tmp_path)
    commands = []
    monkeypatch.setattr(wheelhouse, "run_logged", lambda argv, *_: commands.append([str(word) for word in argv]))
    folders = {
        release: wheelhouse.fill(["jupyterlab"], release, tmp_path / "log", Progress())["jupyterlab"]
        for release in ("bookworm", "trixie")
    }
    assert len(set(folders.values())) == 2
    assert (folders["bookworm"] / "requirements.txt").read_text() == "old==1 --hash=sha256:aa\n"
    assert (folders["trixie"] / "requirements.txt").read_text() == "new==1 --hash=sha256:bb --hash=sha256:cc\n"
    for command, python, abi in zip(commands, ("3.11.2", "3.13.5"), ("cp311", "cp313"), strict=True):
        assert command[command.index("--python-version") + 1] == python
        assert f"--abi={abi}" in command


def test_cpu_nodes_get_the_cpu_build_of_torch():
    (torch,) = [one for one in wheelhouse.packages("horovod", "bookworm") if one.requirement.name == "torch"]
    assert torch.version.endswith("+cpu")
    assert not any(one.requirement.name.startswith("nvidia-") for one in wheelhouse.packages("horovod", "bookworm"))


def test_a_release_without_a_checksum_of_its_torch_is_refused_before_anything_is_created(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(locks, "read", lambda _: [locks.Locked(Requirement("torch==2.0"), ("sha256:aa",))])
    monkeypatch.setattr(wheelhouse, "CACHE", tmp_path)
    with pytest.raises(UserError, match=r"os_release: trixie has Python 3\.13.*no checksum of torch's CPU build"):
        wheelhouse.fill_one("horovod", "trixie", tmp_path / "log")
    monkeypatch.setattr(lifecycle.State, "prepare", lambda _: pytest.fail("deploy went on"))
    assert cli.main(["deploy"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
