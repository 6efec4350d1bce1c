"""A cluster that trains on image shards from its head, with too few cores to decode them.

The tests depend on each other and run in order; the cluster is always removed at the end.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from environments import BIN, ROOT, make_env, podman, remove, run

ENV = "e2edata"
FOLDER = ROOT / "results" / ENV / "data"
# Decoding must be the bottleneck on any machine: each accelerator consumes 3,200 images/s, about six times what a core
# decodes, and the network is fast.
PLAN = {
    "nodes": [2],
    "batches": [64],
    "fabrics": ["ib"],
    "engines": ["ddp"],
    "device": "emulated:v100",
    "compute_ms": 20,
    "data": ["synthetic", "shards:http://head:8880/standin"],
    "data_cores": 1,
    "seconds": 12,
}
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module", autouse=True)
def environment():
    remove(ENV)
    make_env(ENV, 84, 2)
    yield
    remove(ENV)


@pytest.fixture(scope="module")
def trials(tmp_path_factory) -> dict[str, dict]:
    """The sweep's trials by the source of their images."""
    tmp = tmp_path_factory.mktemp("data")
    run(BIN / "bench", "data", "make", "--images", "600", "--shard-mb", "20", "--out", tmp / "standin")
    run(BIN / "cluster", "--env", ENV, "deploy")
    output = run(BIN / "bench", "data", "push", tmp / "standin", "--env", ENV).stdout
    assert PLAN["data"][1] in output
    (tmp / "data.yml").write_text(yaml.safe_dump(PLAN))
    run(BIN / "bench", "sweep", "--env", ENV, "--plan", tmp / "data.yml", "--no-check")
    found = [json.loads(line) for line in (FOLDER / "trials.jsonl").read_text().splitlines()]
    return {trial["point"]["data"].partition(":")[0]: trial for trial in found}


def test_accelerators_wait_for_images(trials):
    synthetic, real = trials["synthetic"], trials["shards"]
    assert synthetic["breakdown_ms"]["data_wait"] < 0.02 * synthetic["step_ms"]["median"]
    assert real["breakdown_ms"]["data_wait"] > 0.2 * real["step_ms"]["median"]
    assert real["images_per_second"]["median"] < synthetic["images_per_second"]["median"]


def test_trial_records_the_input_pipeline(trials):
    found = trials["shards"]["input"]
    assert found["cores"] == 1
    assert found["decode_busy"] > 0.75
    assert found["skipped"] == {}
    assert found["reused"] == max(1, round(trials["shards"]["emulation"]["scale"]))


def test_explain_names_decoding(trials):
    found = json.loads(run(BIN / "bench", "explain", FOLDER, "--json").stdout)
    assert found["limit"] == "decode"
    assert found["weakest"]["stages"] == ["decode"]


def test_report_compares_real_data_with_synthetic(trials):
    assert "Real data:" in (FOLDER / "report.html").read_text()


def test_data_bench_measures_storage_on_a_node(trials):
    """It measures on the last node, over the fabric; explain uses the result."""
    words = ["--env", ENV, "--run", FOLDER, "--seconds", "0.3", "--cores", "1", "--json"]
    found = json.loads(run(BIN / "bench", "data", "bench", PLAN["data"][1].removeprefix("shards:"), *words).stdout)
    assert found["node"] == "w1"
    (backend,) = found["storage"].values()
    assert backend["kind"] == "HTTP"
    assert backend["pipeline"]["images_per_second"] > 0
    assert found["need"]["images_per_second"] == trials["synthetic"]["images_per_second"]["median"]
    assert found["need"]["cores"] > 1
    stages = {one["stage"]: one for one in json.loads(run(BIN / "bench", "explain", FOLDER, "--json").stdout)["path"]}
    assert stages["storage"]["source"] == stages["decode"]["source"] == "measured"


def sweep(tmp_path: Path, name: str, **changes: object) -> tuple[int, dict]:
    """Exit code and last trial of a sweep with a changed plan."""
    (tmp_path / f"{name}.yml").write_text(yaml.safe_dump({**PLAN, **changes}))
    done = run(BIN / "bench", "sweep", "--env", ENV, "--plan", tmp_path / f"{name}.yml", "--no-check", ok=False)
    lines = (ROOT / "results" / ENV / name / "trials.jsonl").read_text().splitlines()
    return done.returncode, json.loads(lines[-1])


def test_real_training_reads_its_images_from_disk(trials, tmp_path):
    changes = {"nodes": [1], "batches": [2], "device": "cpu", "compute_ms": None, "seconds": 3}
    code, trial = sweep(tmp_path, "training", data="shards:/srv/data/standin", **changes)
    assert code == 0, trial["error"]
    assert trial["kind"] == "cpu"
    assert trial["input"]["reused"] == 1
    assert all(0 < loss < 100 for loss in trial["loss"])


def test_stopped_data_server_is_named(trials, tmp_path):
    """The point fails with the name of the shard, and nothing hangs."""
    run("podman", "exec", f"{ENV}-head", "systemctl", "stop", "nginx.service")
    code, trial = sweep(tmp_path, "gone", data=PLAN["data"][1])
    assert code == 1
    assert trial["error"].startswith("http://head:8880/standin/index.json: ")
    assert "gave up after" in trial["error"]
    podman("exec", f"{ENV}-head", "systemctl", "start", "nginx.service")


def test_only_the_heads_fabric_address_serves_data(trials):
    code = "import socket; socket.create_connection(('{}', 8880), 2)"
    contract = json.loads(run(ROOT / f"inventories/{ENV}/terraform.py").stdout)["_meta"]["hostvars"]
    head = contract["head"]
    within = ["podman", "exec", f"{ENV}-w1", "python3", "-c"]
    fabric = head["node_fabric_addresses"]["ib"]
    assert subprocess.run([*within, code.format(fabric)], capture_output=True).returncode == 0
    assert subprocess.run([*within, code.format(head["ansible_host"])], capture_output=True).returncode != 0
    assert subprocess.run([*within, code.format("127.0.0.1")], capture_output=True).returncode != 0


def test_destroy_leaves_nothing():
    run(BIN / "cluster", "--env", ENV, "destroy")
    assert podman("ps", "-a", "--format={{.Names}}", f"--filter=label=horovod-cluster={ENV}") == ""
    assert not Path(ROOT / ".state" / ENV).exists()
