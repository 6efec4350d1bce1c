"""Live nodes survive a second environment of the same name, and the loss of Terraform's state and of our key.

The tests depend on each other and run in order; the cluster is always removed at the end.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest
import yaml
from environments import ROOT, cluster, leftovers, make_env, podman, remove

from cluster.core.state import State

ENV, COPY = "e2elost", "e2ecopy"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", autouse=True)
def environments():
    remove(ENV, COPY)
    make_env(ENV, 83, 2)
    yield
    remove(ENV, COPY)


def containers() -> dict[str, str]:
    """The nodes and what identifies them: a node that is created again gets another id."""
    rows = podman("ps", "--format={{.Names}} {{.ID}}", f"--filter=label=horovod-cluster={ENV}").splitlines()
    return dict(row.split() for row in rows)


def stopped(*words: str, env: str = ENV) -> str:
    """The line with which a command stops; the nodes stay."""
    before = containers()
    done: subprocess.CompletedProcess[str] = cluster(*words, env=env, ok=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1
    assert containers() == before
    return done.stderr


def test_copy_with_the_same_name_or_subnets_is_refused_and_harms_nothing():
    cluster("deploy", env=ENV)
    podman("exec", f"{ENV}-head", "sh", "-c", "echo precious > /root/data")
    shutil.copytree(ROOT / "inventories" / ENV, ROOT / "inventories" / COPY, symlinks=True)
    assert f"cluster.name: {ENV} is in use by ENV={ENV};" in stopped("deploy", env=COPY)
    path = ROOT / f"inventories/{COPY}/group_vars/all/cluster.yml"
    content = yaml.safe_load(path.read_text())
    content["cluster"]["name"] = COPY
    path.write_text(yaml.safe_dump(content))
    assert f"10.83.0.0/24 is in use by ENV={ENV}; free subnets:" in stopped("deploy", env=COPY)
    cluster("destroy", env=COPY)
    assert set(containers()) == {f"{ENV}-head", f"{ENV}-w1"}
    assert leftovers(COPY) == []


def test_lost_key_and_changed_networks_stop_a_deploy():
    state = State(ENV)
    aside = state.key.rename(state.dir / "aside")
    assert "head, w1 and all data on them would be lost: id_ed25519 is missing" in stopped("deploy")
    assert not state.key.exists()
    aside.rename(state.key)
    path = ROOT / f"inventories/{ENV}/group_vars/all/cluster.yml"
    before = path.read_text()
    path.write_text(before.replace("10.83.1.0/24", "10.83.2.0/24"))
    assert "head, w1 and all data on them would be lost: cluster.yml now has" in stopped("deploy")
    path.write_text(before)


@pytest.mark.parametrize("content", [None, "", '{"version": 4, "resou'], ids=["missing", "empty", "damaged"])
def test_deploy_without_terraforms_state_adopts_the_nodes(content: str | None):
    before, tfstate = containers(), State(ENV).tfstate
    tfstate.unlink()
    if content is not None:
        tfstate.write_text(content)
        assert "w1 and all data on them would be lost" in stopped("deploy", "--nodes", "1")
    done = cluster("deploy", env=ENV)
    assert "adopting them as they are" in done.stdout
    assert "2 nodes are up and validated" in done.stdout
    assert containers() == before
    assert podman("exec", f"{ENV}-head", "cat", "/root/data") == "precious"
    assert cluster("status", env=ENV).returncode == 0
    # Terraform knows them again.
    assert "terraform: nothing to change" in cluster("plan", env=ENV).stdout


def test_replace_gives_up_nodes_that_accept_a_lost_key():
    before, state = containers(), State(ENV)
    state.key.unlink()
    done = cluster("deploy", "--replace", env=ENV)
    assert "replacing head, w1; their data is lost" in done.stdout
    after = containers()
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())


def test_destroy_without_terraforms_state_removes_everything():
    State(ENV).tfstate.write_text("{")
    cluster("destroy", env=ENV)
    assert leftovers(ENV) == []
