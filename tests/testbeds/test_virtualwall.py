"""ENV=virtualwall from request to a measured sweep: our unmodified commands, and stand-ins for those of the testbed.

Nodes are containers from the node image, so Ansible, MPI and Horovod really run. The fixture removes everything at the
end, after a failure too.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from environment import BIN, Environment
from standins import gpulab as pems
from standins import virtualwall as standin

from cluster import image
from cluster.core import config
from cluster.core.errors import InfraError
from cluster.core.progress import Progress
from cluster.providers.local.provider import look_here
from cluster.providers.virtualwall import experiment

ENV = "tbvwall"
PASSWORD = "correct-horse-battery"
pytestmark = pytest.mark.timeout(900)


class Wall(Environment):
    """The environment on the stand-in."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ENV, "virtualwall", folder)
        self.pem = pems.make_pem(folder / "login.pem", password=PASSWORD)
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o600)
        (folder / "experimenter-cli2.jar").touch()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "user_key"], check=True)
        self.state.prepare()
        built = image.ensure(self.state, config.load("local"), Progress(ENV))
        self.variables |= standin.install(folder / "wall", built, folder / "user_key.pub")
        self.calls = folder / "wall/calls"

    def configure(self, backend: str = "jfed", **changes: Any) -> None:
        local = config.load("local")
        section = {
            **{"backend": backend, "project": "horovod", "lans": {"1g": "10.86.1.0/24"}},
            **{"ssh_key": str(self.folder / "user_key"), "pem": str(self.pem), "ready_minutes": 1, "hours": 2},
            **{"password_file": str(self.folder / "password"), "jar": str(self.folder / "experimenter-cli2.jar")},
            **{"site": "be-gent1-bi-baremetal1", **changes},
        }
        self.write_cluster_file(
            section,
            admin_cidrs=["10.86.0.1/32"],
            # The same roles as the local cluster: they are in the node image.
            features=local.features.model_dump(),
            storage=local.storage.model_dump(),
            # The stand-in's LAN has no rate limit, so the nodes limit it themselves.
            fabrics={"1g": {"rate_gbps": 1, "transport": "tcp", "shaped": True}},
            active_fabric="1g",
            gpus_per_node=0,
            gpu_model="none",
        )

    def script(self, **values: str) -> None:
        (self.folder / "wall/script.json").write_text(json.dumps(values))

    def remove_nodes(self) -> None:
        """Of this run and of earlier ones that were killed, whose folders differ."""
        here = look_here()
        for owner in {one.owner for one in (*here.containers, *here.networks) if one.cluster == ENV and one.owner}:
            spec = json.dumps({"cluster": ENV, "state_dir": owner})
            conf = str(self.state.dir / "containers.conf")
            self.run(BIN / "python", "-m", standin.NODE_TOOL, "remove-leftovers", INPUT=spec, CONTAINERS_CONF=conf)

    def containers(self) -> list[str]:
        label = f"--filter=label=horovod-cluster={ENV}"
        return self.run("podman", "ps", "-a", "--format={{.Names}}", label).stdout.split()

    def assert_nothing_left(self) -> None:
        assert self.containers() == []
        assert not (self.state.dir / "experiment.json").exists()


@pytest.fixture(scope="module")
def wall(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wall]:
    found = Wall(tmp_path_factory.mktemp("vwall"))
    found.remove_nodes()
    try:
        yield found
    finally:
        found.script()
        if found.inventory.exists():
            found.cluster("destroy", ok=False)
        found.remove_nodes()
        found.remove_files()


FAILURES = {
    "node never ready": ({"ready": "node w1 not ready after 1 minutes"}, {}, 3, "not ready after 1 minutes"),
    "no free nodes": ({"create": "not enough free nodes of type pcgen07-1p"}, {}, 3, "not enough free nodes"),
    "wrong type": ({}, {"hardware_type": "two words"}, 2, "cluster.virtualwall.hardware_type"),
    "no jar": ({}, {"jar": "/nonexistent.jar"}, 2, "cluster.virtualwall.jar"),
    "slices: no login": ({"credentials": "Something is wrong with your user credentials"}, {}, 3, "user credentials"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failure_gives_a_one_line_error_and_leaves_nothing(wall: Wall, case: str) -> None:
    script, changes, code, message = FAILURES[case]
    wall.configure("slices" if case.startswith("slices") else "jfed", **changes)
    wall.script(**script)
    done = wall.cluster("deploy", ok=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    wall.assert_nothing_left()


def test_destroy_works_once_a_wrong_project_is_corrected(wall: Wall) -> None:
    wall.configure(project="other")
    wall.script()
    done = wall.cluster("deploy", ok=False)
    assert done.returncode == 3
    assert "not a member of project other" in done.stderr
    assert done.stderr.count("\n") == 1
    wall.configure()
    wall.cluster("destroy")
    wall.assert_nothing_left()


def test_expired_certificate_is_found_before_the_testbed_is_called(wall: Wall) -> None:
    old = pems.make_pem(wall.folder / "old.pem", days=-1)
    wall.configure(pem=str(old))
    wall.script()
    wall.calls.unlink(missing_ok=True)
    done = wall.cluster("deploy", ok=False)
    assert done.returncode == 2
    assert "cluster.virtualwall.pem: the certificate expired on" in done.stderr
    assert not wall.calls.exists()


def test_destroy_after_a_kill_during_create_releases_the_nodes(wall: Wall) -> None:
    wall.configure()
    wall.script(ready="wait")
    waiting = wall.folder / "wall/waiting"
    waiting.unlink(missing_ok=True)
    process = wall.start(BIN / "cluster", "--env", ENV, "deploy")
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


def test_deploy_renames_interfaces_whose_names_differ(wall: Wall) -> None:
    wall.configure()
    wall.script(other_name="w1")
    wall.cluster("deploy")
    contract = json.loads(wall.run(wall.inventory / "terraform.py").stdout)
    fabric = contract["cluster"]["vars"]["contract_fabrics"]["1g"]
    assert fabric["interface"] == "fabric0"
    assert contract["_meta"]["hostvars"]["w1"]["ansible_host"] == "10.86.0.11"
    assert contract["cluster"]["vars"]["ansible_user"] == "ops"


def test_status_shows_the_expiry_and_renew_extends_it(wall: Wall) -> None:
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
    (line,) = (wall.results / "two/trials.jsonl").read_text().splitlines()
    trial = json.loads(line)
    assert trial["status"] == "ok", trial["error"]
    assert trial["traffic"]["interface"] == "fabric0"
    assert set(trial["traffic"]["measured_bytes"]) == {"head", "w1"}


def test_no_secret_in_state_logs_or_results(wall: Wall) -> None:
    key = wall.pem.read_text().split("PRIVATE KEY-----")[1].strip().splitlines()[3]
    checked = 0
    for folder in (wall.state.dir, wall.results):
        for path in folder.rglob("*"):
            if path.is_file():
                text = path.read_text(errors="replace")
                assert PASSWORD not in text, path
                assert key not in text, path
                checked += 1
    assert checked > 5
    assert "password" in (wall.state.dir / "logs/jfed.log").read_text()


def test_destroy_releases_everything(wall: Wall) -> None:
    wall.script()
    wall.cluster("destroy")
    wall.assert_nothing_left()
    assert not wall.state.dir.exists()


def test_slices_creates_and_deletes_the_same_nodes(wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    wall.configure("slices")
    for name, value in {**wall.variables, **wall.state.environment()}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", wall.variables["PATH"])
    wall.state.prepare()
    content = yaml.safe_load(config.cluster_file(ENV).read_text())["cluster"]
    addresses = {"head": "10.86.1.10", "w1": "10.86.1.11"}
    nodes = {name: {"index": i, "addresses": {"1g": address}} for i, (name, address) in enumerate(addresses.items())}
    value = {"name": ENV, "settings": content["virtualwall"], "nodes": nodes, "fabrics": content["fabrics"]}
    created, request = experiment.from_input({**value, "state_dir": str(wall.state.dir)})

    wall.script(never_up="w1")
    created.control_plane.section = created.section.model_copy(update={"ready_minutes": 0.05})
    with pytest.raises(InfraError, match="no login for w1"):
        created.create(request)
    wall.assert_nothing_left()

    wall.script()
    created.create(request)
    found = json.loads((wall.state.dir / "nodes.json").read_text())
    assert found["addresses"] == {"head": "10.86.0.10", "w1": "10.86.0.11"}
    assert found["interfaces"] == {"1g": "fabric0"}
    created.delete()
    wall.assert_nothing_left()
