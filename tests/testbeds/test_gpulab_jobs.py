"""ENV=gpulab from probe to a measured sweep, both modes: gpulab-cli as it is, a stand-in server, and jobs that really
run: containers from the image of containers/training, with Horovod over Gloo between them. Devices are emulated."""

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
from standins import gpulab as standin

from cluster import image
from cluster.core import config
from cluster.core.state import State
from cluster.providers.gpulab import training_image

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv/bin"
ENV = "tbgpulab"
LABEL = f"horovod-cluster={ENV}"
pytestmark = pytest.mark.timeout(900)


class Lab:
    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, State(ENV)
        self.inventory = ROOT / "inventories" / ENV
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.pem = standin.make_pem(folder / "login.pem")
        self.configure()
        self.state.prepare()
        # A copy: destroy removes the state folder before the stand-in's own containers and networks go.
        conf = shutil.copy(self.state.dir / "containers.conf", folder)
        self.environment = {**os.environ, **self.state.environment(), "CONTAINERS_CONF": str(conf)}
        wanted = training_image.name(config.load(ENV))
        self.keep_image = image.exists(self.state, wanted)
        self.image = training_image.build(self.state, config.load(ENV), print)
        self.apart = False
        self.remove_networks()
        for number in (0, 1):
            subnet = f"10.86.{2 + number}.0/24"
            self.podman("network", "create", "--internal", "--label", LABEL, "--subnet", subnet, f"{ENV}-{number}")
        self.server = standin.Gpulab(self.pem, standin.Script(), self.start)
        self.environment |= self.server.environment

    def configure(self) -> None:
        shutil.rmtree(self.inventory, ignore_errors=True)
        shutil.copytree(ROOT / "inventories/gpulab", self.inventory, symlinks=True)
        path = self.inventory / "group_vars/all/cluster.yml"
        content = yaml.safe_load(path.read_text())["cluster"]
        content |= {"name": ENV, "nodes": 2, "gpus_per_node": 0, "gpu_model": "none"}
        # The same roles as the local cluster: the image to build upon is then there already.
        content["features"] = config.load("local").features.model_dump()
        content["gpulab"] |= {"project": "horovod", "pem": str(self.pem), "poll_seconds": 0.5, "start_minutes": 2}
        del content["gpulab"]["password_file"]
        path.write_text(yaml.safe_dump({"cluster": content}))

    def podman(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(["podman", *words], env=self.environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def start(self, job: standin.Job) -> subprocess.Popen[str]:
        """A job as GPULab would run it, except that the image is the local one and the storage a folder here."""
        docker = job.definition["request"]["docker"]
        (storage,) = docker["storage"]
        network = f"{ENV}-{job.number % 2 if self.apart else 0}"
        return subprocess.Popen(
            [
                *("podman", "run", "--rm", "--label", LABEL, "--name", f"{ENV}-{job.id}"),
                *("--hostname", f"job{job.number}", f"--network={network}:interface_name=eth0"),
                f"--volume={self.shared}:{storage['containerPath']}",
                *(f"--env={name}={value}" for name, value in docker["environment"].items()),
                self.image,
                *docker["command"],
            ],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str | Path, ok: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(word) for word in words],
            cwd=ROOT,
            env={**self.environment, **env},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert not ok or done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    def cluster(self, *words: str, ok: bool = True, mode: str = "Nx1") -> subprocess.CompletedProcess[str]:
        return self.run(BIN / "cluster", "--env", ENV, *words, ok=ok, MODE=mode)

    def remove_networks(self) -> None:
        for name in self.podman("ps", "-aq", f"--filter=label={LABEL}", check=False).split():
            self.podman("rm", "-f", "-t", "0", name, check=False)
        for name in self.podman("network", "ls", "-q", f"--filter=label={LABEL}", check=False).split():
            self.podman("network", "rm", "-f", name, check=False)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    found = Lab(tmp_path_factory.mktemp("gpulab"))
    try:
        with found.server:
            yield found
    finally:
        found.remove_networks()
        if not found.keep_image:
            found.podman("rmi", found.image, check=False)
        for folder in (found.inventory, found.state.dir, ROOT / "results" / ENV):
            shutil.rmtree(folder, ignore_errors=True)
        (ROOT / ".state" / f"{ENV}.lock").unlink(missing_ok=True)


def trial_of(lab: Lab, mode: str) -> dict[str, Any]:
    plan = lab.folder / "two.yml"
    plan.write_text(
        yaml.safe_dump(
            {
                **{"nodes": [2], "batches": [32], "fabrics": ["net"], "engines": ["horovod-gloo"]},
                **{"device": "emulated:p100", "seconds": 4},
            }
        )
    )
    lab.run(BIN / "bench", "sweep", "--env", ENV, "--plan", plan, "--no-check", MODE=mode)
    (line,) = (ROOT / "results" / ENV / f"two-{mode}/trials.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_probe_says_plainly_that_jobs_do_not_reach_each_other(lab: Lab) -> None:
    lab.apart = True
    done = lab.cluster("deploy", ok=False)
    lab.apart = False
    assert done.returncode == 3
    assert "jobs do not reach each other" in done.stderr
    assert "MODE=1xN" in done.stderr
    assert done.stderr.count("\n") == 1
    assert lab.server.alive == []


def test_ten_jobs_with_one_gpu_in_small_two_jobs_train_together(lab: Lab) -> None:
    lab.cluster("deploy")
    assert json.loads((lab.state.dir / "probe.json").read_text())["unreachable"] == []
    trial = trial_of(lab, "Nx1")
    assert trial["status"] == "ok", trial["error"]
    assert (trial["point"]["nodes"], trial["point"]["gpus_per_node"]) == (2, 1)
    assert len(trial["traffic"]["measured_bytes"]) == 2
    assert min(trial["traffic"]["measured_bytes"].values()) > 0
    assert lab.server.alive == []
    assert list((lab.shared / "horovod-cluster").iterdir()) == []


def test_one_job_with_several_gpus_trains(lab: Lab) -> None:
    lab.cluster("deploy", mode="1xN")
    trial = trial_of(lab, "1xN")
    assert trial["status"] == "ok", trial["error"]
    assert (trial["point"]["nodes"], trial["point"]["gpus_per_node"]) == (1, 2)
    assert lab.server.alive == []


def test_both_modes_stand_side_by_side(lab: Lab) -> None:
    runs = [ROOT / "results" / ENV / f"two-{mode}" for mode in ("1xN", "Nx1")]
    out = lab.run(BIN / "bench", "report", *runs, "--out", lab.folder / "report").stdout
    assert f"{ENV}/two-1xN" in out
    assert f"{ENV}/two-Nx1" in out


def test_status_and_destroy(lab: Lab) -> None:
    assert "mode 1xN" in lab.cluster("status", mode="1xN").stdout
    lab.cluster("destroy", mode="1xN")
    assert lab.server.alive == []
    assert not lab.state.dir.exists()
    assert lab.podman("ps", "-aq", f"--filter=label={LABEL}").split() == []


def started(lab: Lab, *words: str | Path) -> subprocess.Popen[bytes]:
    """A command under way, with both of its jobs running."""
    before = len(lab.server.jobs)
    process = subprocess.Popen(
        [str(word) for word in words], cwd=ROOT, env={**lab.environment, "MODE": "Nx1"}, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while not [job for job in list(lab.server.jobs.values())[before:] if job.status == "RUNNING"]:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def test_bench_that_is_killed_takes_its_jobs_along(lab: Lab) -> None:
    lab.cluster("deploy")
    plan = lab.folder / "long.yml"
    plan.write_text((lab.folder / "two.yml").read_text().replace("seconds: 4", "seconds: 300"))
    process = started(lab, BIN / "bench", "sweep", "--env", ENV, "--plan", plan, "--no-check")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 120
    while lab.server.alive and time.monotonic() < deadline:
        time.sleep(0.2)
    assert lab.server.alive == []
    lab.cluster("destroy")


def test_destroy_after_a_deploy_that_was_killed_cancels_the_probe(lab: Lab) -> None:
    lab.server.script.never_start = len(lab.server.jobs) + 1
    process = started(lab, BIN / "cluster", "--env", ENV, "deploy")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    lab.server.script.never_start = None
    lab.cluster("destroy")
    assert lab.server.alive == []
    assert not lab.state.dir.exists()
