"""ENV=gpulab from probe to a measured sweep, in both modes, with the unmodified gpulab-cli and a stand-in server.

Jobs really run: they are containers from the image of containers/training, with Horovod over Gloo between them.
Devices are emulated.
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
from environment import BIN, Environment
from standins import gpulab as standin

from cluster import image
from cluster.core import config
from cluster.core.progress import Progress
from cluster.providers.gpulab import training_image

ENV = "tbgpulab"
LABEL = f"horovod-cluster={ENV}"
pytestmark = pytest.mark.timeout(900)


class Gpulab(Environment):
    """The environment on the stand-in."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ENV, "gpulab", folder)
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.pem = standin.make_pem(folder / "login.pem")
        self.write_cluster_file(
            {
                **{"project": "horovod", "pem": str(self.pem), "password_file": None},
                **{"poll_seconds": 0.5, "start_minutes": 2},
            },
            # The same roles as the local cluster, so that the node image exists already.
            features=config.load("local").features.model_dump(),
            gpus_per_node=0,
            gpu_model="none",
        )
        self.state.prepare()
        # A copy: destroy removes the state folder before the stand-in removes its containers and networks.
        conf = shutil.copy(self.state.dir / "containers.conf", folder)
        self.variables |= {**self.state.environment(), "CONTAINERS_CONF": str(conf)}
        wanted = training_image.name(config.load(ENV))
        self.keep_image = image.exists(self.state, wanted)
        self.image = training_image.build(self.state, config.load(ENV), Progress(ENV))
        self.separate_networks = False
        self.remove_containers()
        for number in (0, 1):
            subnet = f"10.86.{2 + number}.0/24"
            self.podman("network", "create", "--internal", "--label", LABEL, "--subnet", subnet, f"{ENV}-{number}")
        self.server = standin.GpulabServer(self.pem, standin.Script(), self.start_job)
        self.variables |= {**self.server.environment, "MODE": "Nx1"}

    def podman(self, *words: str, check: bool = True) -> str:
        return self.run("podman", *words, ok=check).stdout

    def start_job(self, job: standin.SimulatedJob) -> subprocess.Popen[str]:
        """Run a job as GPULab would, but with the local image and a folder of this machine as storage."""
        docker = job.definition["request"]["docker"]
        (storage,) = docker["storage"]
        network = f"{ENV}-{job.number % 2 if self.separate_networks else 0}"
        return subprocess.Popen(
            [
                *("podman", "run", "--rm", "--label", LABEL, "--name", f"{ENV}-{job.id}"),
                *("--hostname", f"job{job.number}", f"--network={network}:interface_name=eth0"),
                f"--volume={self.shared}:{storage['containerPath']}",
                *(f"--env={name}={value}" for name, value in docker["environment"].items()),
                self.image,
                *docker["command"],
            ],
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def remove_containers(self) -> None:
        for name in self.podman("ps", "-aq", f"--filter=label={LABEL}", check=False).split():
            self.podman("rm", "-f", "-t", "0", name, check=False)
        for name in self.podman("network", "ls", "-q", f"--filter=label={LABEL}", check=False).split():
            self.podman("network", "rm", "-f", name, check=False)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpulab]:
    found = Gpulab(tmp_path_factory.mktemp("gpulab"))
    try:
        with found.server:
            yield found
    finally:
        found.remove_containers()
        if not found.keep_image:
            found.podman("rmi", found.image, check=False)
        found.remove_files()


def measure(lab: Gpulab, mode: str) -> dict[str, Any]:
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
    (line,) = (lab.results / f"two-{mode}/trials.jsonl").read_text().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_probe_reports_that_jobs_do_not_reach_each_other(lab: Gpulab) -> None:
    lab.separate_networks = True
    done = lab.cluster("deploy", ok=False)
    lab.separate_networks = False
    assert done.returncode == 3
    assert "jobs do not reach each other" in done.stderr
    assert "MODE=1xN" in done.stderr
    assert done.stderr.count("\n") == 1
    assert lab.server.alive == []


def test_two_jobs_with_one_gpu_each_train_together(lab: Gpulab) -> None:
    lab.cluster("deploy")
    assert json.loads((lab.state.dir / "probe.json").read_text())["unreachable"] == []
    trial = measure(lab, "Nx1")
    assert trial["status"] == "ok", trial["error"]
    assert (trial["point"]["nodes"], trial["point"]["gpus_per_node"]) == (2, 1)
    assert len(trial["traffic"]["measured_bytes"]) == 2
    assert min(trial["traffic"]["measured_bytes"].values()) > 0
    assert lab.server.alive == []
    assert list((lab.shared / "horovod-cluster").iterdir()) == []


def test_one_job_with_several_gpus_trains(lab: Gpulab) -> None:
    lab.cluster("deploy", MODE="1xN")
    trial = measure(lab, "1xN")
    assert trial["status"] == "ok", trial["error"]
    assert (trial["point"]["nodes"], trial["point"]["gpus_per_node"]) == (1, 2)
    assert lab.server.alive == []


def test_report_compares_both_modes(lab: Gpulab) -> None:
    runs = [lab.results / f"two-{mode}" for mode in ("1xN", "Nx1")]
    out = lab.run(BIN / "bench", "report", *runs, "--out", lab.folder / "report").stdout
    assert f"{ENV}/two-1xN" in out
    assert f"{ENV}/two-Nx1" in out


def test_status_shows_the_mode_and_destroy_leaves_nothing(lab: Gpulab) -> None:
    assert "mode 1xN" in lab.cluster("status", MODE="1xN").stdout
    lab.cluster("destroy", MODE="1xN")
    assert lab.server.alive == []
    assert not lab.state.dir.exists()
    assert lab.podman("ps", "-aq", f"--filter=label={LABEL}").split() == []


def start_until_jobs_run(lab: Gpulab, *words: str | Path) -> subprocess.Popen[bytes]:
    """Start a command and return it as soon as one of its jobs runs."""
    before = len(lab.server.jobs)
    process = lab.start(*words, MODE="Nx1")
    deadline = time.monotonic() + 240
    while not [job for job in list(lab.server.jobs.values())[before:] if job.status == "RUNNING"]:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def test_jobs_of_a_killed_bench_are_cancelled(lab: Gpulab) -> None:
    lab.cluster("deploy")
    plan = lab.folder / "long.yml"
    plan.write_text((lab.folder / "two.yml").read_text().replace("seconds: 4", "seconds: 300"))
    process = start_until_jobs_run(lab, BIN / "bench", "sweep", "--env", ENV, "--plan", plan, "--no-check")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 120
    while lab.server.alive and time.monotonic() < deadline:
        time.sleep(0.2)
    assert lab.server.alive == []
    lab.cluster("destroy")


def test_destroy_after_a_killed_deploy_cancels_the_probe(lab: Gpulab) -> None:
    lab.server.script.never_start = len(lab.server.jobs) + 1
    process = start_until_jobs_run(lab, BIN / "cluster", "--env", ENV, "deploy")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    lab.server.script.never_start = None
    lab.cluster("destroy")
    assert lab.server.alive == []
    assert not lab.state.dir.exists()
