"""A whole sweep inside the training image, with two ranks per node, over a fabric that is not shaped.

One node has no Horovod of its own, so its ranks can only be those of the image.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

import environments
from environments import BIN, ROOT, run

from cluster.core import config
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers.gpulab import training_image

ENV, SECOND, NODES = "imagesweep", 88, ("head", "w1")
IMAGE = "localhost/horovod-cluster-sweep-in-image:1"
ENGINES = ["horovod-gloo", "horovod-mpi", "ddp", "ps"]
STORAGE = "/home/horovod/.local/share/containers"
pytestmark = pytest.mark.timeout(3600)


def inside(node: str, command: str) -> str:
    return run("podman", "exec", f"{ENV}-{node}", "sh", "-c", command).stdout


def save_image(folder: Path) -> Path:
    """The training image as one layer: the nodes' storage driver keeps a full copy per layer."""
    made = training_image.build(State(ENV), config.load(ENV), Progress(ENV))
    (folder / "Containerfile").write_text(f"FROM {made}\n")
    words = ("--quiet", "--squash-all", "--tag", IMAGE, "--file", folder / "Containerfile")
    run("podman", "build", *words, folder)
    run("podman", "save", "--quiet", "--output", folder / "image.tar", IMAGE)
    run("podman", "rmi", IMAGE)
    return folder / "image.tar"


def write_environment(**variables: str) -> None:
    path = ROOT / f"inventories/{ENV}/group_vars/all/cluster.yml"
    content = yaml.safe_load(path.read_text())
    content["cluster"]["fabrics"] = {"1g": {"rate_gbps": 1, "transport": "tcp", "shaped": False}}
    content["cluster"].setdefault("features", {})["containers"] = True
    path.write_text(yaml.safe_dump(content | variables))


@pytest.fixture(scope="module", autouse=True)
def deployed(tmp_path_factory):
    environments.remove(ENV)
    environments.make_env(ENV, SECOND, len(NODES))
    try:
        archive = save_image(tmp_path_factory.mktemp("image"))
        write_environment()
        environments.cluster("deploy", env=ENV)
        for node in NODES:
            # Every start of a container copies the image, in memory fast enough.
            inside(node, f"install -d -o horovod -g horovod {STORAGE} && mount -t tmpfs -o mode=755 tmpfs {STORAGE}")
            inside(node, f"chown horovod:horovod {STORAGE}")
        write_environment(containers_image=f"archive:{archive}")
        environments.cluster("deploy", env=ENV)
        archive.unlink()
        inside("w1", "mv /opt/horovod /opt/horovod.away")
        yield
    finally:
        environments.remove(ENV)


def test_sweep_with_every_engine_runs_inside_the_training_image(tmp_path):
    plan = tmp_path / "image.yml"
    values = {"nodes": [2], "gpus_per_node": [2], "batches": [1], "fabrics": "all", "models": ["mobilenetv2"]}
    values |= {"engines": ENGINES, "device": "cpu", "container": IMAGE, "seconds": 4}
    plan.write_text(yaml.safe_dump(values))
    run(BIN / "bench", "sweep", "--env", ENV, "--plan", plan, timeout=1500)
    rows = (ROOT / f"results/{ENV}/image/trials.jsonl").read_text().splitlines()
    found = [json.loads(row) for row in rows]
    assert [(trial["point"]["engine"], trial["status"], trial["error"]) for trial in found] == [
        (engine, "ok", None) for engine in ENGINES
    ]
    for trial in found:
        traffic = trial["traffic"]
        assert traffic["measured_bytes"].keys() == set(NODES)
        assert all(sent > 0.85 * traffic["expected_bytes"] for sent in traffic["measured_bytes"].values())
        assert trial["kind"] == "cpu" and trial["settings"]["container"] == IMAGE
    for node in NODES:
        assert inside(node, "su -l horovod -c 'podman ps -q'") == ""
