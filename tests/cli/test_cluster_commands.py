"""`cluster` commands that must change nothing, or only what nothing uses."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
from project import ENV, Project, last_line
from standins import podman

pytestmark = pytest.mark.timeout(120)
COMMANDS = (
    *("deploy", "scale --nodes 2", "plan", "config", "status", "doctor", "adopt", "cost", "artefacts", "lab"),
    *("destroy", "release-hosts", "renew", "training-image", "clean", "shell"),
)
NODE, OLD, BASE = (f"localhost/horovod-cluster-{name}" for name in ("node:new", "node:old", "base:x"))


@pytest.fixture
def machine(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without containers, and a cache of its own."""
    for name, value in podman.install(project.tmp).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(project.tmp / "cache"))
    return project.tmp


def fill_cache(machine: Path) -> list[Path]:
    folders = [machine / "cache/horovod-cluster" / name for name in ("wheelhouse/0123", "horovod/4567")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "a.whl").write_text("wheel")
    return folders


def written(project: Project) -> list[str]:
    """Every file below the project's folder and its cache but bytecode."""
    found = [path for top in (project.folder, project.tmp / "cache") for path in top.rglob("*")]
    return sorted(str(path) for path in found if "__pycache__" not in path.parts and ".venv" not in path.parts)


@pytest.mark.parametrize("env", ["nosuch", f"../.state/{ENV}", "a/../local", "", "."])
def test_unknown_environment_is_refused_and_nothing_is_written(project: Project, machine: Path, env: str) -> None:
    fill_cache(machine)
    # The commands run in one process each; all of them for one name, one for the others.
    for command in COMMANDS if env == "nosuch" else ("clean",):
        before = written(project), podman.read(machine)
        done = project.run("cluster", "--env", env, *command.split())
        assert done.returncode == 2, f"{command}: {last_line(done)}"
        assert f"ENV={env}: no such environment; choose one of" in done.stderr
        assert done.stderr.count("\n") == 1
        assert (written(project), podman.read(machine)) == before, command


def test_scale_without_a_number_changes_nothing(project: Project, machine: Path) -> None:
    before = written(project)
    done = project.run("cluster", "--env", ENV, "scale")
    assert done.returncode == 2
    assert "--nodes: missing" in done.stderr
    assert written(project) == before


def test_sweep_of_a_plan_that_cannot_fit_costs_nothing(project: Project, machine: Path) -> None:
    terraform = project.folder / "bin/terraform"
    terraform.unlink()
    terraform.write_text(f"#!/bin/sh\ntouch {machine}/terraform-ran\nexit 1\n")
    terraform.chmod(0o755)
    for env, plan, message in (
        ("aws", {"fabrics": ["1g"]}, "plan.fabrics: unknown fabric '1g'; choose from "),
        ("aws", {"gpus_per_node": 16, "device": "cuda"}, "plan.device: cuda needs 16 GPUs per node, the cluster has "),
        ("baremetal", {"nodes": [64]}, "plan.nodes: 64 nodes requested, the cluster has "),
        (ENV, {"device": "cuda"}, "plan.device: cuda needs 1 GPUs per node, the cluster has 0"),
    ):
        (machine / "plan.yml").write_text(json.dumps({"nodes": [1], "batches": [32], "fabrics": "active", **plan}))
        before, containers = set(written(project)), podman.read(machine)
        done = project.run("bench", "sweep", "--env", env, "--plan", machine / "plan.yml")
        assert done.returncode == 2, last_line(done)
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (machine / "terraform-ran").exists()
        # The lock of the environment, and its folder.
        assert {Path(path).name for path in set(written(project)) - before} <= {".state", f"{env}.lock"}
        assert podman.read(machine) == containers


def test_plan_builds_no_image(project: Project, machine: Path) -> None:
    # What a build starts with; without it, a build ends with another message.
    builder = machine / "bin/mmdebstrap"
    builder.write_text(f"#!/bin/sh\ntouch {machine}/built\nexit 1\n")
    builder.chmod(0o755)
    done = project.run("cluster", "--env", ENV, "plan")
    assert done.returncode == 0, last_line(done)
    assert not (machine / "built").exists()
    assert "image: a deploy would build it first" in done.stdout
    assert "4 to add" in done.stdout


def test_doctor_reports_what_deploy_refuses(project: Project, machine: Path) -> None:
    refused = project.run("cluster", "--env", "aws", "deploy")
    assert refused.returncode == 2
    report = json.loads(project.run("cluster", "--env", "aws", "doctor", "--json").stdout)
    found = {one["name"]: one["detail"] for one in report["failures"]}
    assert refused.stderr == f"cluster: {found['cluster.yml']}\n"
    assert "203.0.113.0/24 is an example network" in refused.stderr


def boot_elsewhere(machine: Path) -> Path:
    """A node of another checkout, booted from the newer of two node images."""
    images = {NODE: "1", OLD: "2", BASE: "3"}
    podman.write(machine, podman.read(machine) | {"images": images, "parents": {"1": "3", "2": "3"}})
    state = machine / "elsewhere/.state/local"
    labels = {"horovod-cluster": "local", "horovod-cluster-state": str(state), "horovod-cluster-node": "local-head 01"}
    podman.add_container(machine, "local-head", labels, state / "seeds/head", image="1")
    state.mkdir(parents=True)
    return state


def test_clean_keeps_what_is_in_use_and_says_why(project: Project, machine: Path) -> None:
    state = boot_elsewhere(machine)
    folders = fill_cache(machine)
    done = project.run("cluster", "--env", ENV, "clean")
    assert done.returncode == 0, last_line(done)
    left = podman.read(machine)
    assert list(left["containers"]) == ["local-head"]
    assert set(left["images"]) == {NODE, BASE}
    user = f"ENV=local of {state.parents[1]}"
    assert f"kept    {NODE}: {user} runs local-head from it" in done.stdout
    assert f"kept    {BASE}: a kept image is based on it" in done.stdout
    assert f"removed {OLD}" in done.stdout
    for folder in folders:
        assert (folder / "a.whl").exists()
        assert f"kept    {folder}: {user} is deployed" in done.stdout


def test_clean_removes_everything_that_nothing_uses(project: Project, machine: Path) -> None:
    boot_elsewhere(machine)
    content = podman.read(machine)
    podman.write(machine, content | {"containers": {}, "images": content["images"] | {"docker.io/other:1": "9"}})
    folders = fill_cache(machine)
    done = project.run("cluster", "--env", ENV, "clean")
    assert done.returncode == 0, last_line(done)
    assert set(podman.read(machine)["images"]) == {"docker.io/other:1"}
    assert not any(folder.exists() for folder in folders)
    assert "-f" not in [word for line in (machine / "calls").read_text().splitlines() for word in line.split()]
    assert not (project.folder / ".state").exists()


def test_clean_keeps_or_removes_a_program_as_a_whole(project: Project, machine: Path) -> None:
    boot_elsewhere(machine)
    program = machine / "cache/horovod-cluster/uv-0.1"
    (program / "bin").mkdir(parents=True)
    done = project.run("cluster", "--env", ENV, "clean")
    assert [line for line in done.stdout.splitlines() if "uv-0.1" in line and f"kept    {program}:" not in line] == []
    assert (program / "bin").exists()
    podman.write(machine, podman.read(machine) | {"containers": {}})
    done = project.run("cluster", "--env", ENV, "clean")
    assert f"removed {program}\n" in done.stdout
    assert not program.exists()


def test_clean_keeps_an_image_and_packages_of_any_container(project: Project, machine: Path) -> None:
    boot_elsewhere(machine)
    used, unused = fill_cache(machine)
    content = podman.read(machine) | {"containers": {}}
    podman.write(machine, content)
    podman.add_container(machine, "guest", {}, None, image="2", mounts={str(used): "/wheels"})
    done = project.run("cluster", "--env", ENV, "clean")
    assert done.returncode == 0, last_line(done)
    assert set(podman.read(machine)["images"]) == {OLD, BASE}
    assert used.exists()
    assert not unused.exists()
    assert f"kept    {used}: the container guest uses it" in done.stdout


def test_clean_waits_for_no_build_but_refuses(project: Project, machine: Path) -> None:
    folders = fill_cache(machine)
    lock = machine / "cache/horovod-cluster/image.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = project.run("cluster", "--env", ENV, "clean")
    assert done.returncode == 2
    assert "an image is being built" in done.stderr
    assert all(folder.exists() for folder in folders)
    assert lock.exists()
