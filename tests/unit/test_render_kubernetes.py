"""`bench render kubernetes`: manifests that the published schemas accept, as the golden files have them.

UPDATE_GOLDEN=1 writes the golden files again.
"""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

import bench
from bench.cli import main
from bench.render import kubernetes
from bench.results import store
from bench.worker import protocol
from cluster.core import config
from cluster.core.config import ROOT

GOLDEN = ROOT / "tests/fixtures/kubernetes"
IMAGE = "registry.example.org/team/training@sha256:" + "0123456789abcdef" * 4
RDMA = {"rdma_resource": "rdma/hca", "network": "rdma-net", "interface": "net1", "claim": "team-data", "queue": "gpus"}
VERSIONS = ("1.29", "1.33", kubernetes_validate.latest_version())


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, and an environment whose cluster.yml has the section."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "part").mkdir()
    (tmp_path / "part/more.py").write_text("x = 1\n")
    (tmp_path / "big.bin").write_bytes(os.urandom(1 << 20))
    (tmp_path / ".runignore").write_text("*.bin\n")
    monkeypatch.chdir(tmp_path)
    section(monkeypatch)
    return tmp_path


def section(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    values = yaml.safe_load((ROOT / "inventories/local/group_vars/all/cluster.yml").read_text())["cluster"]
    found = config.Cluster.model_validate({**values, "kubernetes": {"image": IMAGE, **more}})
    monkeypatch.setattr(config, "load", lambda env: found)


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["render", "kubernetes", *words]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    if manifest["kind"] == "MPIJob":
        return [one["template"] for one in manifest["spec"]["mpiReplicaSpecs"].values()]
    return [manifest["spec"]["template"]] if manifest["kind"] == "Job" else []


def validate(manifests: list[dict[str, Any]]) -> None:
    for manifest in manifests:
        if manifest["kind"] == "MPIJob":
            jsonschema.validate(manifest, json.loads((GOLDEN / "mpijob.schema.json").read_text()))
            kinds = [{"apiVersion": "v1", "kind": "PodTemplate", "template": one} for one in pods(manifest)]
        else:
            kinds = [manifest]
        for version in VERSIONS:
            for one in kinds:
                kubernetes_validate.validate(one, desired_version=version, strict=True)


def golden(name: str, manifests: list[dict[str, Any]]) -> None:
    # Compressed bytes and the worker's folder change with versions.
    for manifest in manifests:
        if "binaryData" in manifest:
            manifest["binaryData"] = dict.fromkeys(manifest["binaryData"], "")
    file = GOLDEN / f"{name}.yml"
    if "UPDATE_GOLDEN" in os.environ:
        file.write_text(yaml.safe_dump_all(manifests, sort_keys=False))
    assert manifests == list(yaml.safe_load_all(file.read_text()))


@pytest.mark.parametrize("form", ["job", "mpijob"])
@pytest.mark.parametrize("network", ["tcp", "rdma"])
def test_manifests_are_valid_and_as_committed(
    form: str, network: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if network == "rdma":
        section(monkeypatch, **RDMA, cpus=32, memory_gb=256, pull_secret="registry")
    words = ["--as", form, "--nodes", "4", "--gpus-per-node", "8", "--", "python", "train.py", "--lr", "0.1"]
    found = rendered(capsys, *words)
    validate(found)
    golden(f"{form}-{network}", found)


def test_the_schemas_refuse_what_is_wrong(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A validator that accepts everything proves nothing."""
    for form, kind in (("job", "Job"), ("mpijob", "MPIJob")):
        found = rendered(capsys, "--as", form, "--", "python", "train.py")
        (one,) = [manifest for manifest in found if manifest["kind"] == kind]
        pods(one)[0]["spec"]["containers"][0]["volumeMount"] = []
        with pytest.raises(kubernetes_validate.ValidationError):
            validate([one])
    one["spec"]["slots"] = 8
    with pytest.raises(jsonschema.ValidationError):
        validate([one])


def test_the_ranks_of_a_job_find_the_first_pod(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {one["kind"]: one for one in rendered(capsys, "--name", "mine", "--nodes", "3", "--", "python", "train.py")}
    job, service, pod = found["Job"], found["Service"], found["Job"]["spec"]["template"]
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (3, 3, "Indexed")
    # Pod 0 of job `mine` is mine-0, in the domain of the headless service.
    assert service["spec"]["clusterIP"] == "None" and pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert "--master-addr=mine-0.mine " in pod["spec"]["containers"][0]["command"][2]
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]


def test_the_folder_travels_without_what_runignore_lists(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--", "python", "train.py"]
    (config_map,) = [one for one in rendered(capsys, *words) if one["kind"] == "ConfigMap"]
    archive = base64.b64decode(config_map["binaryData"][kubernetes.ARCHIVE])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert {"train.py", "part/more.py"} <= set(tar.getnames()) and "big.bin" not in tar.getnames()
    assert rendered(capsys, *words)[1] == config_map
    (desk / ".runignore").unlink()
    assert main(["render", "kubernetes", *words]) == 2
    assert "more than 700 KiB packed" in capsys.readouterr().err
    assert "ConfigMap" not in [one["kind"] for one in rendered(capsys, "--no-code", *words)]


def test_the_worker_runs_the_points_of_a_plan(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = {"nodes": [2, 4], "gpus_per_node": 8, "batches": [64], "fabrics": ["10g"], "device": "cuda"}
    Path("gpus.yml").write_text(yaml.safe_dump(plan))
    found = rendered(capsys, "--plan", "gpus.yml", "--as", "mpijob", "--nodes", "4")
    validate(found)
    by_kind = {one["kind"]: one for one in found}
    launcher, worker = pods(by_kind["MPIJob"])
    assert worker["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert "resources" not in launcher["spec"]["containers"][0]
    command = launcher["spec"]["containers"][0]["command"]
    assert command[command.index("-np") + 1] == "32"
    content = base64.b64decode(by_kind["ConfigMap"]["binaryData"]["spec.json"])
    Path("spec.json").write_bytes(content)
    # As the worker reads it.
    spec = protocol.read_spec("spec.json", command[command.index("--sha256") + 1])
    assert [trial.batch for trial in spec.launches[0].trials] == [64]
    assert main(["render", "kubernetes", "--plan", "gpus.yml", "--nodes", "4"]) == 2
    error = capsys.readouterr().err
    assert "--as job needs one launch with ddp on 4 nodes" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "COMMAND: missing"),
        ("-- python none.py", "none.py: no such file"),
        ("--folder none -- python x.py", "--folder none: no such folder"),
        ("--name Train -- python train.py", "--name: 'Train' must have a-z"),
        ("--plan quick -- python train.py", "leave out the command"),
        ("--plan quick", "--as job needs one launch with ddp on 4 nodes"),
    ],
)
def test_what_cannot_work_is_one_line(words: str, told: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "kubernetes", *words.split()]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_an_image_by_digest_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "train.yml"
    assert main(["render", "kubernetes", "--out", str(out), "--", "python", "train.py"]) == 2
    error = capsys.readouterr().err
    assert "cluster.kubernetes.image: missing" in error and error.count("\n") == 1
    assert not out.exists()
    file = tmp_path / "cluster.yml"
    text = (ROOT / "inventories/local/group_vars/all/cluster.yml").read_text()
    file.write_text(text + "\n  kubernetes: {image: 'registry.example.org/training:latest'}\n")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(config.UserError, match=r"kubernetes\.image"):
        patch.setattr(config, "ROOT", tmp_path)
        config.read(file)


PLAN = {"nodes": [2], "batches": [4], "fabrics": ["10g"], "engines": ["ddp"], "models": ["mobilenetv2"]}


def test_the_workers_log_becomes_trials_that_a_report_shows(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log is of two ranks that the command of a Job started; only the bytes on eth0 were filled in."""
    monkeypatch.setattr(store, "RESULTS", desk / "results")
    Path("two.yml").write_text(yaml.safe_dump({**PLAN, "device": "cpu", "seconds": 6}))
    Path("rank0.log").write_text("something else\n" + (GOLDEN / "worker.log").read_text())
    words = ["render", "kubernetes", "--env", "k8s", "--plan", "two.yml", "--nodes", "2", "--name", "two"]
    assert main([*words, "--results", "rank0.log"]) == 0
    assert "mobilenetv2 batch 4: ok, " in capsys.readouterr().out
    (trial,) = bench.load(desk / "results/k8s/two").trials
    assert (trial.kind, trial.point.nodes, trial.traffic.interface) == ("cpu", 2, "eth0")
    assert main(["report", "results/k8s/two", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]
    # A log that was cut names its trials, and one of something else is refused.
    Path("rank0.log").write_text("".join((GOLDEN / "worker.log").read_text().splitlines(keepends=True)[:3]))
    assert main([*words, "--results", "rank0.log"]) == 2
    assert "give the log of rank 0" in capsys.readouterr().err
    failed = '@bench {"event": "Failed", "error": "no card"}\n'
    Path("rank0.log").write_text(failed)
    assert main([*words, "--results", "rank0.log"]) == 1
    assert "failed, no card" in capsys.readouterr().out
    assert main(["render", "kubernetes", "--results", "rank0.log"]) == 2
    assert "--results: needs the --plan" in capsys.readouterr().err
