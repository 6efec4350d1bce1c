"""ENV=virtualwall from request to a measured sweep: unmodified commands of ours, stand-ins for the testbed's.

Nodes are containers from the node image, so Ansible, MPI and Horovod really run. Everything is removed at the end
whatever happened.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from standins import gpulab as pems
from standins import virtualwall as standin

from cluster import image
from cluster.core import config
from cluster.core.errors import InfraError
from cluster.core.state import State
from cluster.providers.virtualwall import experiment

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv/bin"
ENV = "tbvwall"
PASSWORD = "correct-horse-battery"
pytestmark = pytest.mark.timeout(900)


class Wall:
    """One environment on the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = State(ENV)
        self.inventory = ROOT / "inventories" / ENV
        self.pem = pems.make_pem(folder / "login.pem", password=PASSWORD)
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o600)
        (folder / "experimenter-cli2.jar").touch()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "user_key"], check=True)
        self.state.prepare()
        built = image.ensure(self.state, config.load("local"), print)
        self.environment = {**os.environ, **standin.install(folder / "wall", built, folder / "user_key.pub")}
        self.calls = folder / "wall/calls"

    def configure(self, backend: str = "jfed", **changes: Any) -> None:
        shutil.rmtree(self.inventory, ignore_errors=True)
        shutil.copytree(ROOT / "inventories/virtualwall", self.inventory, symlinks=True)
        path = self.inventory / "group_vars/all/cluster.yml"
        content = yaml.safe_load(path.read_text())["cluster"]
        content |= {
            **{"name": ENV, "nodes": 2, "admin_cidrs": ["10.86.0.1/32"], "active_fabric": "1g", "gpus_per_node": 0},
            # The same roles as the local cluster: its image is there and holds them.
            "features": config.load("local").features.model_dump(),
            "storage": config.load("local").storage.model_dump(),
            # The stand-in's LAN has no rate of its own, so the nodes keep it.
            **{"gpu_model": "none", "fabrics": {"1g": {"rate_gbps": 1, "transport": "tcp", "shaped": True}}},
        }
        content["virtualwall"] |= {
            **{"backend": backend, "project": "horovod", "lans": {"1g": "10.86.1.0/24"}},
            **{"ssh_key": str(self.folder / "user_key"), "pem": str(self.pem), "ready_minutes": 1, "hours": 2},
            **{"password_file": str(self.folder / "password"), "jar": str(self.folder / "experimenter-cli2.jar")},
            **{"site": "be-gent1-bi-baremetal1", **changes},
        }
        path.write_text(yaml.safe_dump({"cluster": content}))

    def script(self, **values: str) -> None:
        (self.folder / "wall/script.json").write_text(json.dumps(values))

    def run(self, *words: str | Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(word) for word in words], cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=600
        )
        if ok:
            assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    def cluster(self, *words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(BIN / "cluster", "--env", ENV, *words, ok=ok)

    def containers(self) -> list[str]:
        label = f"--filter=label=horovod-cluster={ENV}"
        return self.run("podman", "ps", "-a", "--format={{.Names}}", label).stdout.split()

    def assert_nothing_left(self) -> None:
        assert self.containers() == []
        assert not (self.state.dir / "experiment.json").exists()


@pytest.fixture(scope="module")
def wall(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wall]:
    found = Wall(tmp_path_factory.mktemp("vwall"))

    def remove() -> None:
        found.script()
        if found.inventory.exists():
            found.cluster("destroy", ok=False)
        spec = {**found.environment, "INPUT": json.dumps({"cluster": ENV})}
        subprocess.run([BIN / "python", "-m", standin.NODE_TOOL, "sweep"], env=spec, check=False)
        for folder in (found.inventory, found.state.dir, ROOT / "results" / ENV):
            shutil.rmtree(folder, ignore_errors=True)
        (ROOT / ".state" / f"{ENV}.lock").unlink(missing_ok=True)

    try:
        yield found
    finally:
        remove()


FAILURES = {
    "node never ready": ({"ready": "node w1 not ready after 1 minutes"}, {}, 3, "not ready after 1 minutes"),
    "no free nodes": ({"create": "not enough free nodes of type pcgen07-1p"}, {}, 3, "not enough free nodes"),
    "wrong type": ({}, {"hardware_type": "two words"}, 2, "cluster.virtualwall.hardware_type"),
    "no jar": ({}, {"jar": "/nonexistent.jar"}, 2, "cluster.virtualwall.jar"),
    "slices: no login": ({"credentials": "Something is wrong with your user credentials"}, {}, 3, "user credentials"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failure_ends_in_one_line_and_leaves_nothing(wall: Wall, case: str) -> None:
    script, changes, code, message = FAILURES[case]
    wall.configure("slices" if case.startswith("slices") else "jfed", **changes)
    wall.script(**script)
    done = wall.cluster("deploy", ok=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    wall.assert_nothing_left()


def test_project_that_refuses_both_create_and_delete_is_cleared_once_it_is_corrected(wall: Wall) -> None:
    wall.configure(project="other")
    wall.script()
    done = wall.cluster("deploy", ok=False)
    assert done.returncode == 3
    assert "not a member of project other" in done.stderr
    assert done.stderr.count("\n") == 1
    wall.configure()
    wall.cluster("destroy")
    wall.assert_nothing_left()


def test_expired_certificate_is_found_before_the_testbed_is_asked(wall: Wall) -> None:
    old = pems.make_pem(wall.folder / "old.pem", days=-1)
    wall.configure(pem=str(old))
    wall.script()
    wall.calls.unlink(missing_ok=True)
    done = wall.cluster("deploy", ok=False)
    assert done.returncode == 2
    assert "cluster.virtualwall.pem: the certificate expired on" in done.stderr
    assert not wall.calls.exists()


def test_destroy_after_a_kill_during_create_gives_nodes_back(wall: Wall) -> None:
    wall.configure()
    wall.script(ready="wait")
    waiting = wall.folder / "wall/waiting"
    waiting.unlink(missing_ok=True)
    process = subprocess.Popen(
        [BIN / "cluster", "--env", ENV, "deploy"], cwd=ROOT, env=wall.environment, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while not waiting.exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(wall.containers()) == 2
    wall.script()
    wall.cluster("destroy")
    wall.assert_nothing_left()
    assert not wall.state.dir.exists()


def test_deploy_configures_and_validates_nodes_whose_cards_have_different_names(wall: Wall) -> None:
    wall.configure()
    wall.script(other_name="w1")
    wall.cluster("deploy")
    contract = json.loads(wall.run(wall.inventory / "terraform.py").stdout)
    fabric = contract["cluster"]["vars"]["contract_fabrics"]["1g"]
    assert fabric["interface"] == "fabric0"
    assert contract["_meta"]["hostvars"]["w1"]["ansible_host"] == "10.86.0.11"
    assert contract["cluster"]["vars"]["ansible_user"] == "ops"


def test_status_shows_when_it_ends_and_renew_moves_that(wall: Wall) -> None:
    before = wall.cluster("status").stdout
    assert "expires" in before
    record = wall.state.dir / "experiment.json"
    first = json.loads(record.read_text())["expires"]
    time.sleep(1.1)
    wall.cluster("renew")
    assert json.loads(record.read_text())["expires"] > first
    assert "RENEW" in wall.calls.read_text()


def test_bench_runs_on_both_nodes(wall: Wall) -> None:
    plan = wall.folder / "two.yml"
    plan.write_text(
        yaml.safe_dump(
            {"nodes": [2], "batches": [32], "fabrics": ["1g"], "device": "emulated:p100", "seconds": 4, "title": "two"}
        )
    )
    wall.run(BIN / "bench", "sweep", "--env", ENV, "--plan", plan, "--no-check")
    (line,) = (ROOT / "results" / ENV / "two/trials.jsonl").read_text().splitlines()
    trial = json.loads(line)
    assert trial["status"] == "ok", trial["error"]
    assert trial["traffic"]["interface"] == "fabric0"
    assert set(trial["traffic"]["measured_bytes"]) == {"head", "w1"}


def test_no_secret_in_state_logs_or_results(wall: Wall) -> None:
    key = wall.pem.read_text().split("PRIVATE KEY-----")[1].strip().splitlines()[3]
    looked = 0
    for folder in (wall.state.dir, ROOT / "results" / ENV):
        for path in folder.rglob("*"):
            if path.is_file():
                text = path.read_text(errors="replace")
                assert PASSWORD not in text, path
                assert key not in text, path
                looked += 1
    assert looked > 5
    assert "password" in (wall.state.dir / "logs/jfed.log").read_text()


def test_destroy_gives_everything_back(wall: Wall) -> None:
    wall.script()
    wall.cluster("destroy")
    wall.assert_nothing_left()
    assert not wall.state.dir.exists()


def test_slices_makes_and_deletes_the_same_nodes(wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    wall.configure("slices")
    for name, value in {**wall.environment, **wall.state.environment()}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", wall.environment["PATH"])
    wall.state.prepare()
    content = yaml.safe_load(config.cluster_file(ENV).read_text())["cluster"]
    addresses = {"head": "10.86.1.10", "w1": "10.86.1.11"}
    nodes = {name: {"index": i, "addresses": {"1g": address}} for i, (name, address) in enumerate(addresses.items())}
    value = {"name": ENV, "settings": content["virtualwall"], "nodes": nodes, "fabrics": content["fabrics"]}
    made, request = experiment.from_input({**value, "state_dir": str(wall.state.dir)})

    wall.script(never_up="w1")
    made.tool.settings = made.settings.model_copy(update={"ready_minutes": 0.05})
    with pytest.raises(InfraError, match="no login for w1"):
        made.create(request)
    wall.assert_nothing_left()

    wall.script()
    made.create(request)
    found = json.loads((wall.state.dir / "nodes.json").read_text())
    assert found["addresses"] == {"head": "10.86.0.10", "w1": "10.86.0.11"}
    assert found["interfaces"] == {"1g": "fabric0"}
    made.delete()
    wall.assert_nothing_left()
