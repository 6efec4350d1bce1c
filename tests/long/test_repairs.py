"""Every repair that doctor proposes for a cluster works, and the first time."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "e2e"), str(TESTS / "drill")]

import environments  # noqa: E402
from environments import ROOT, podman  # noqa: E402
from faults import FAULTS, Fault, Scene  # noqa: E402
from run import start_sweep  # noqa: E402

ENV = "repairs"
NODES = ["head", "w1"]
pytestmark = pytest.mark.timeout(1500)
# Those that break a cluster without a sweep. The drill has the others.
BROKEN = [
    fault for fault in FAULTS if not fault.healthy and "controller" not in fault.name and "rate" not in fault.name
]


def lose_horovod(scene: Scene) -> None:
    scene.inside("rm", "-rf", "/opt/horovod/bin")


def leave_a_rate(scene: Scene) -> None:
    scene.inside("fabric-rate", "set", "125")


BROKEN += [
    Fault("fabric unit stopped", lambda scene: scene.inside("systemctl", "stop", "fabric-rate")),
    Fault("rate left by a killed sweep", leave_a_rate),
    Fault("Horovod lost", lose_horovod),
]


def cluster(*words: str, ok: bool = True):
    return environments.cluster(*words, env=ENV, ok=ok)


@pytest.fixture(scope="module", autouse=True)
def deployed():
    environments.remove(ENV)
    environments.make_env(ENV, 85, len(NODES))
    cluster("deploy")
    yield
    environments.remove(ENV)


def failures() -> list[dict[str, str]]:
    return json.loads(cluster("doctor", "--json", ok=False).stdout)["failures"]


# A worker outlives the server of its share.
CASES = [(fault, "w1") for fault in BROKEN]
CASES += [(fault, "head") for fault in FAULTS if fault.name in ("node killed", "node removed", "node paused")]


@pytest.mark.parametrize(("fault", "victim"), CASES, ids=[f"{fault.name} ({victim})" for fault, victim in CASES])
def test_repair_that_doctor_proposes_works_at_once(fault: Fault, victim: str) -> None:
    fault.inject(Scene(ENV, NODES, victim=victim))
    found = failures()
    assert [failure["name"] for failure in found] == [f"node {victim}"]
    assert found[0]["fix"] == f"make deploy ENV={ENV}"
    assert cluster("status", ok=False).returncode == 1
    cluster("deploy")
    assert failures() == []
    assert cluster("status").returncode == 0


def test_deploy_refuses_to_go_on_without_its_key_and_doctor_says_what_works() -> None:
    """Ansible's connections outlive the key by two minutes."""
    key = ROOT / f".state/{ENV}/id_ed25519"
    kept = key.read_bytes()
    key.unlink()
    try:
        done = cluster("deploy", ok=False)
        assert done.returncode == 2
        assert "validated" not in done.stdout
        assert {failure["fix"] for failure in failures()} == {f"make deploy ENV={ENV} REPLACE=1"}
    finally:
        key.write_bytes(kept)
        key.chmod(0o600)
    assert failures() == []


def fabric_mbit() -> float | None:
    return json.loads(podman("exec", f"{ENV}-w1", "fabric-rate", "show"))["mbit"]


def test_next_sweep_repairs_the_rate_that_a_killed_one_left() -> None:
    usual = fabric_mbit()
    sweep = start_sweep(Scene(ENV, NODES), "killed")
    while sweep.poll() is None and fabric_mbit() == usual:
        time.sleep(0.5)
    sweep.kill()
    sweep.communicate()
    found = failures()
    assert {failure["name"] for failure in found} == {"node head", "node w1"}
    assert all("a measurement was killed" in failure["detail"] for failure in found)
    done = cluster("status", ok=False)
    assert done.returncode == 1
    assert "a measurement was killed" in done.stdout
    again = start_sweep(Scene(ENV, NODES), "killed")
    output, _ = again.communicate()
    assert again.returncode == 0, output
    assert failures() == []


@pytest.mark.parametrize("words", [["scale", "--nodes", "1"], ["destroy"]], ids=["scale", "destroy"])
def test_running_job_is_not_interrupted_without_yes(words: list[str]) -> None:
    sleep = ["exec", "-d", "-u", "horovod", f"{ENV}-w1", "sleep", "400"]
    podman(*sleep)
    done = cluster(*words, ok=False)
    assert done.returncode == 2
    assert "node w1 runs sleep 400" in done.stderr
    assert podman("exec", f"{ENV}-w1", "pgrep", "-x", "sleep")
    podman("exec", f"{ENV}-w1", "pkill", "-x", "sleep")


def test_destroy_says_what_is_in_the_share() -> None:
    podman("exec", "-u", "horovod", f"{ENV}-w1", "sh", "-c", "echo data > /shared/results/mine")
    done = cluster("destroy")
    assert "1 files (0.0 MB) in /shared will be lost" in done.stderr
