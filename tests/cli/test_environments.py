"""A second environment on one machine: what is refused before anything changes, and the copy that works."""

from __future__ import annotations

import ipaddress
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from project import ENV, REQUIRED, Project, last_line
from standins import podman

pytestmark = pytest.mark.timeout(120)
LABELS = ("horovod-cluster", "horovod-cluster-state")


@pytest.fixture
def machine(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without containers; its commands come first in the project's PATH."""
    for name, value in podman.install(project.tmp).items():
        monkeypatch.setenv(name, value)
    return project.tmp


def change(project: Project, **values: Any) -> None:
    (project.variables / "cluster.yml").write_text(json.dumps({"cluster": {**REQUIRED, **values}}))


def deploy_elsewhere(machine: Path, state: Path, name: str, *subnets: str) -> None:
    """Leave what a deploy of another environment leaves: a node and two networks."""
    state.mkdir(parents=True, exist_ok=True)
    labels = dict(zip(LABELS, (name, str(state.resolve())), strict=True))
    for kind, subnet in zip(("management", "fabric"), subnets, strict=True):
        podman.add_network(machine, f"{name}-{kind}", subnet, labels)
    own = {**labels, "horovod-cluster-node": f"{name}-head 0123"}
    podman.add_container(machine, f"{name}-head", own, state / "seeds/head", networks=[f"{name}-fabric"])


def refused(project: Project, machine: Path, command: str = "deploy") -> str:
    """The one line with which a command is refused. Nothing changes."""
    before = podman.read(machine), sorted(project.folder.glob(".state/**"))
    done = project.run("cluster", "--env", ENV, command)
    assert done.returncode == 2, last_line(done)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert (podman.read(machine), sorted(project.folder.glob(".state/**"))) == before
    return done.stderr


def free_subnets(line: str) -> list[ipaddress.IPv4Network]:
    return [ipaddress.IPv4Network(text) for text in re.findall(r"\d+\.\d+\.\d+\.\d+/\d+", line.rpartition("free")[2])]


@pytest.mark.parametrize("command", ["deploy", "plan"])
def test_name_of_another_environment_is_refused(project: Project, machine: Path, command: str) -> None:
    deploy_elsewhere(machine, project.folder / ".state/first", ENV, "10.50.0.0/24", "10.50.1.0/24")
    line = refused(project, machine, command)
    assert f"cluster.name: {ENV} is in use by ENV=first;" in line
    assert len(free_subnets(line)) == 2


def test_subnet_of_another_checkout_is_refused_with_its_place_and_a_free_one(project: Project, machine: Path) -> None:
    other = project.tmp / "elsewhere"
    deploy_elsewhere(machine, other / ".state/local", "local", "10.99.1.0/24", "10.50.1.0/24")
    line = refused(project, machine)
    assert f"cluster.networks.fabric: 10.99.1.0/24 is in use by ENV=local of {other};" in line
    taken = [ipaddress.IPv4Network(text) for text in ("10.99.0.0/24", "10.99.1.0/24", "10.50.1.0/24")]
    first, second = free_subnets(line)
    assert not first.overlaps(second)
    assert not any(free.overlaps(one) for free in (first, second) for one in taken)


@pytest.mark.parametrize(
    ("routes", "network", "holder"),
    [
        ([{"dst": "10.99.0.0/16", "dev": "eth1"}], "10.88.0.0/16", "this machine's interface eth1 (10.99.0.0/16)"),
        ([], "10.99.0.128/25", "the podman network other (10.99.0.128/25)"),
    ],
)
def test_subnet_of_anything_else_on_this_machine_is_refused(
    project: Project, machine: Path, routes: list[dict[str, str]], network: str, holder: str
) -> None:
    podman.add_network(machine, "other", network)
    podman.write(machine, podman.read(machine) | {"routes": routes})
    assert f"cluster.networks.management: 10.99.0.0/24 is in use by {holder};" in refused(project, machine)


def test_name_of_a_container_that_no_cluster_made_is_refused(project: Project, machine: Path) -> None:
    podman.add_container(machine, f"{ENV}-w1", {}, None)
    assert f"cluster.name: {ENV} is in use by the podman container {ENV}-w1;" in refused(project, machine)


def test_environment_that_is_deployed_keeps_its_subnets_while_its_networks_are_gone(
    project: Project, machine: Path
) -> None:
    state = project.folder / ".state/first"
    state.mkdir(parents=True)
    (state / "cluster.yml").write_text(json.dumps({"cluster": {**REQUIRED, "name": "first"}}))
    assert "10.99.0.0/24 is in use by ENV=first;" in refused(project, machine)


def test_networks_of_an_earlier_version_do_not_stop_their_own_cluster(project: Project, machine: Path) -> None:
    for name, subnet in REQUIRED["networks"].items():
        podman.add_network(machine, f"{ENV}-{name}", subnet, {"horovod-cluster": ENV})
    done = project.run("cluster", "--env", ENV, "plan")
    assert done.returncode == 0, last_line(done)


def test_doctor_reports_a_subnet_in_use(project: Project, machine: Path) -> None:
    podman.add_network(machine, "other", "10.99.1.0/24")
    report = json.loads(project.run("cluster", "--env", ENV, "doctor", "--json").stdout)
    (found,) = [one for one in report["failures"] if one["name"] == "cluster.yml"]
    assert "10.99.1.0/24 is in use by the podman network other" in found["detail"]


def copy(project: Project, *words: str) -> subprocess.CompletedProcess[str]:
    return project.run("cluster", "env", *words)


def test_copy_has_its_own_name_and_subnets_and_keeps_the_rest(project: Project, machine: Path) -> None:
    deploy_elsewhere(machine, project.tmp / "b/.state/local", "other", "10.96.0.0/24", "10.96.1.0/24")
    done = copy(project, "second")
    assert done.returncode == 0, last_line(done)
    folder = project.folder / "inventories"
    place = "group_vars/all/cluster.yml"
    texts = [(folder / env / place).read_text() for env in ("local", "second")]
    first, second = (yaml.safe_load(text)["cluster"] for text in texts)
    assert second["name"] == "second"
    subnets = [ipaddress.IPv4Network(text) for text in second["networks"].values()]
    taken = [*first["networks"].values(), *REQUIRED["networks"].values(), "10.96.0.0/24", "10.96.1.0/24"]
    assert not any(subnet.overlaps(ipaddress.IPv4Network(text)) for subnet in subnets for text in taken)
    assert second["admin_cidrs"] == [f"{subnets[0][1]}/32"]
    own = ("name", "networks", "admin_cidrs")
    assert {key: second[key] for key in second if key not in own} == {
        key: first[key] for key in first if key not in own
    }
    comments = [[line.partition("#")[1:] for line in text.splitlines()] for text in texts]
    assert comments[0] == comments[1]
    assert (folder / "second/terraform.py").readlink() == Path("../terraform.py")
    done = project.run("cluster", "--env", "second", "config")
    assert done.returncode == 0, last_line(done)


def test_copy_of_a_copy_shares_nothing_with_it(project: Project, machine: Path) -> None:
    assert copy(project, "second").returncode == 0
    assert copy(project, "no", "--from", "second").returncode == 0
    pieces = [
        yaml.safe_load((project.folder / f"inventories/{env}/group_vars/all/cluster.yml").read_text())["cluster"]
        for env in ("local", "second", "no")
    ]
    # YAML reads the word no as false.
    assert pieces[2]["name"] == "no"
    subnets = [text for one in pieces for text in one["networks"].values()]
    assert len(set(subnets)) == len(subnets) == 6


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "NAME=: write a name"),
        (["local"], "inventories/local exists"),
        (["../x"], "NAME=../x: write a name"),
        (["x" * 21], "at most 20 characters"),
        (["x", "--from", "nosuch"], "ENV=nosuch: no such environment"),
        (["taken"], "this cluster name is in use by ENV=local of"),
    ],
)
def test_copy_that_cannot_work_is_refused(project: Project, machine: Path, words: list[str], problem: str) -> None:
    deploy_elsewhere(machine, project.tmp / "b/.state/local", "taken", "10.96.0.0/24", "10.96.1.0/24")
    before = sorted(project.folder.glob("inventories/**"))
    done = copy(project, *words)
    assert done.returncode == 2
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(project.folder.glob("inventories/**")) == before


@pytest.mark.parametrize(("provider", "name"), [("aws", "aws"), ("virtualwall", "horovod")])
def test_name_of_a_deployed_cluster_of_the_same_provider_is_refused(
    project: Project, machine: Path, provider: str, name: str
) -> None:
    state = project.folder / ".state/first"
    state.mkdir(parents=True)
    (state / "cluster.yml").write_text(project.run("cluster", "--env", provider, "config").stdout)
    done = project.run("cluster", "--env", provider, "deploy")
    assert done.returncode == 2
    assert f"cluster.name: {name} is in use by ENV=first;" in done.stderr
    assert not (project.folder / ".state" / provider).exists()
