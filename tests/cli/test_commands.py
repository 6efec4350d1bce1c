"""Commands as a user types them. Only command lines and files are used, so that modules can move."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from project import BIN, ENV, LONGEST_ARGUMENT, PREDICT, REQUIRED, ROOT, RUNS, Project, last_line, run


@pytest.mark.parametrize(
    ("changes", "points"),
    [({"repeats": 5}, 15), ({"models": ["resnet50", "resnet101", "resnet152"]}, 9)],
    ids=["five repeats", "three ResNets"],
)
def test_launch_of_many_points_fits_in_arguments(deployed: Project, changes: dict[str, Any], points: int) -> None:
    done = deployed.sweep(batches=[32, 64, 96], **changes)
    assert "Argument list too long" not in done.stderr, last_line(done)
    assert "Traceback" not in done.stderr, last_line(done)
    calls = deployed.calls()
    assert any("mpirun" in " ".join(call["argv"]) + call["stdin"] for call in calls), "ssh was not asked to launch"
    assert max(len(word.encode()) + 1 for call in calls for word in call["argv"]) <= LONGEST_ARGUMENT
    # The stand-in starts no worker: each trial fails, and is recorded.
    assert done.returncode == 1, last_line(done)
    trials = deployed.trials()
    assert len(trials) == points
    assert {(trial["status"], trial["error_node"]) for trial in trials} == {("failed", None)}


def test_config_prints_cluster_yml_with_every_default(project: Project) -> None:
    done = project.run("cluster", "--env", ENV, "config", "--json")
    assert done.returncode == 0, last_line(done)
    found = json.loads(done.stdout)["cluster"]
    assert found["ports"]["ssh"] == 22
    assert found["fabrics"] == {"1g": {"rate_gbps": 1, "transport": "tcp", "shaped": True}}
    assert (found["gpus_per_node"], found["gpu_model"]) == (0, "none")
    assert {name: found[name] for name in REQUIRED if name != "fabrics"} == {
        name: value for name, value in REQUIRED.items() if name != "fabrics"
    }
    # It only prints.
    assert not (project.folder / ".state").exists()
    assert json.loads((project.variables / "cluster.yml").read_text()) == {"cluster": REQUIRED}


def test_terraform_plans_a_cluster_that_names_required_fields_only(project: Project) -> None:
    done = project.run("cluster", "--env", ENV, "config", "--json")
    assert done.returncode == 0, last_line(done)
    (project.tmp / "cluster.yml").write_text(done.stdout)
    variables = {"cluster_file": project.tmp / "cluster.yml", "image": "x", "state_dir": project.tmp}
    given = [word for name, value in variables.items() for word in ("-var", f"{name}={value}")]
    for words in (["init", "-input=false"], ["plan", "-input=false", "-no-color", *given]):
        done = run(
            project.folder / "bin/terraform",
            *words,
            cwd=project.folder / "terraform/local",
            TF_DATA_DIR=str(project.tmp / "terraform"),
        )
        assert done.returncode == 0, done.stderr
    assert "Plan: 4 to add" in done.stdout


def with_transport(source: Path, target: Path, transport: str, fabric: str | None = None, keep: int = 0) -> Path:
    """A copy of a run whose trials are of schema 2 and record their transport; the first `keep` stay of schema 1."""
    shutil.copytree(source, target)
    lines = (source / "trials.jsonl").read_text().splitlines()
    for number, line in enumerate(lines[keep:], start=keep):
        trial = json.loads(line)
        trial["schema_version"] = 2
        trial["point"] |= {"transport": transport, "fabric": fabric or trial["point"]["fabric"]}
        lines[number] = json.dumps(trial)
    (target / "trials.jsonl").write_text("\n".join(lines) + "\n")
    return target


def report_text(run_folder: Path) -> str:
    done = run(BIN / "bench", "report", run_folder, cwd=run_folder)
    assert done.returncode == 0, last_line(done)
    pages = [(run_folder / name).read_text() for name in ("report.md", "report.html")]
    text = "\n".join([done.stdout, done.stderr, *pages])
    # The rate on eight nodes: the trials were read.
    assert "2,811 (2,778 to 2,847)" in text, next(
        (line for line in text.splitlines() if "left out" in line), "no point"
    )
    return text


def test_report_does_not_call_a_tcp_fabric_named_ib_infiniband(tmp_path: Path) -> None:
    assert report_text(with_transport(RUNS / "compute-ib", tmp_path / "run", "tcp")).count("InfiniBand") == 0


def test_report_calls_verbs_on_a_fabric_named_ib_infiniband(tmp_path: Path) -> None:
    assert report_text(with_transport(RUNS / "compute-ib", tmp_path / "run", "verbs")).count("InfiniBand") > 0


def as_schema_1(source: Path, target: Path) -> Path:
    """A copy of a run as earlier versions wrote it: points have no transport."""
    shutil.copytree(source, target)
    lines = [json.loads(line) for line in (source / "trials.jsonl").read_text().splitlines()]
    for trial in lines:
        trial["schema_version"] = 1
        del trial["point"]["transport"]
        trial["transport"] = trial.pop("traffic")
    (target / "trials.jsonl").write_text("".join(f"{json.dumps(trial)}\n" for trial in lines))
    return target


def test_report_takes_the_transport_of_old_trials_from_provenance(tmp_path: Path) -> None:
    # A sweep has always written the fabrics of the contract there.
    folder = as_schema_1(RUNS / "compute-ib", tmp_path / "run")
    recorded = json.loads((folder / "provenance.json").read_text())
    recorded["fabrics"]["ib"] |= {"transport": "tcp", "shaped": True}
    (folder / "provenance.json").write_text(json.dumps(recorded))
    assert report_text(folder).count("InfiniBand") == 0


@pytest.mark.parametrize(("fabric", "transport"), [("ib", "tcp"), ("net", "verbs")])
def test_calibration_takes_the_transport_that_the_trials_record(tmp_path: Path, fabric: str, transport: str) -> None:
    folder = with_transport(RUNS / "compute-ib", tmp_path / "run", transport, fabric)
    done = run(BIN / "bench", "predict", "--calibrate", folder, "--gpus", "16", "--json", cwd=tmp_path)
    assert done.returncode == 0, last_line(done)
    predictions = json.loads(done.stdout)["predictions"]
    assert {(row["series"].split()[0], row["transport"]) for row in predictions} == {(fabric, transport)}


def test_trials_of_both_schemas_are_read_and_keep_their_ids(tmp_path: Path) -> None:
    ids = [json.loads(line)["id"] for line in (RUNS / "compute-ib/trials.jsonl").read_text().splitlines()]
    old = as_schema_1(RUNS / "compute-ib", tmp_path / "old")
    mixed = with_transport(RUNS / "compute-ib", tmp_path / "mixed", "verbs", keep=4)
    for folder in (old, mixed):
        done = run(BIN / "bench", "export", folder, "--format", "json", cwd=tmp_path)
        assert done.returncode == 0, last_line(done)
        assert [trial["id"] for trial in json.loads(done.stdout)["trials"]] == ids


def measured_trials() -> list[str]:
    """The lines of two real trials of an earlier version: batch 32 on one node and on two, at 1 Gbit/s."""
    lines = (ROOT / "bench/report/example/quick/trials.jsonl").read_text().splitlines()
    points = [json.loads(line)["point"] for line in lines]
    wanted = [point["fabric"] == "1g" and point["nodes"] < 3 and point["batch"] == 32 for point in points]
    return list(compress(lines, wanted))


def test_new_trials_record_their_transport_and_old_ones_are_not_repeated(deployed: Project) -> None:
    old = measured_trials()
    assert len(old) == 2 and {json.loads(line)["schema_version"] for line in old} == {1}
    deployed.results.mkdir(parents=True)
    (deployed.results / "trials.jsonl").write_text("\n".join(old) + "\n")
    # Both old trials are of batch 32, on one node and on two.
    done = deployed.sweep(nodes=[1, 2], batches=[32, 48], engines=["horovod-gloo"])
    assert done.returncode == 1, last_line(done)
    trials = deployed.trials()
    assert [trial["id"] for trial in trials[:2]] == [json.loads(line)["id"] for line in old]
    assert sorted((trial["point"]["nodes"], trial["point"]["batch"]) for trial in trials[2:]) == [(1, 48), (2, 48)]
    assert {trial["point"].get("transport") for trial in trials[2:]} == {"tcp"}, "point.transport is not recorded"


def test_predict_takes_verbs_and_points_from_rdma_to_it(tmp_path: Path) -> None:
    verbs, rdma = (run(BIN / "bench", *PREDICT, "--transport", word, cwd=tmp_path) for word in ("verbs", "rdma"))
    assert verbs.returncode == 0, last_line(verbs)
    assert rdma.returncode == 0, last_line(rdma)
    assert "verbs" not in verbs.stderr
    assert "verbs" in rdma.stderr, "no hint that rdma is now called verbs"
    assert json.loads(rdma.stdout) == json.loads(verbs.stdout)
    assert json.loads(verbs.stdout)["transport"] == "verbs"


def test_predict_fuses_in_mib_as_a_launch_does(tmp_path: Path) -> None:
    # ResNet-50 has 97.5 MiB of gradients, which are 102.2 million bytes: 100 MiB hold them all, and so do 200.
    steps = []
    for size in ("100", "200"):
        done = run(BIN / "bench", *PREDICT, "--engine", "ddp", "--fusion-mb", size, cwd=tmp_path)
        assert done.returncode == 0, last_line(done)
        steps.append(json.loads(done.stdout)["step_ms"])
    assert steps[0] == steps[1], f"step_ms {steps[0]} with --fusion-mb 100, {steps[1]} with 200"


def test_data_push_uses_the_environments_variables(deployed: Project) -> None:
    (deployed.variables / "data.yml").write_text("data_dir: /srv/elsewhere\ndata_port: 8899\n")
    made = deployed.run("bench", "data", "make", "--images", "2", "--out", deployed.tmp / "set")
    assert made.returncode == 0, last_line(made)
    done = deployed.run("bench", "data", "push", deployed.tmp / "set", "--env", ENV)
    assert done.returncode == 0, last_line(done)
    (call,) = deployed.calls()
    assert "/srv/elsewhere/set" in call["argv"][-1], f"ssh was given: {call['argv'][-1]}"
    assert "/srv/data" not in call["argv"][-1]
    assert "http://head:8899/set" in done.stdout


def with_bad_line(lines: list[str], folder: Path, number: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [*lines[: number - 1], '{"id": "not a trial"', *lines[number - 1 :]]
    (folder / "trials.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def names_bad_line(done: subprocess.CompletedProcess[str], number: int) -> bool:
    said = [line for line in (done.stdout + done.stderr).splitlines() if "left out" in line]
    return any(re.search(r"\b1 line\b", line) and re.search(rf"\bline {number}\b", line) for line in said)


def test_every_command_names_the_line_that_it_left_out(tmp_path: Path) -> None:
    good = RUNS / "compute-ib"
    bad = shutil.copytree(good, tmp_path / "bad")
    with_bad_line((good / "trials.jsonl").read_text().splitlines(), bad, 5)
    commands = {
        "report": ["report", bad],
        "explain": ["explain", bad],
        "compare": ["compare", good, bad],
        "export": ["export", bad, "--format", "json"],
        "predict": ["predict", "--calibrate", bad, "--gpus", "16"],
    }
    wrong = {}
    for name, words in commands.items():
        done = run(BIN / "bench", *words, cwd=tmp_path)
        if done.returncode not in (0, 1) or "Traceback" in done.stderr:
            wrong[name] = last_line(done)
        elif not names_bad_line(done, 5):
            wrong[name] = "does not say that line 5 was left out"
    assert not wrong, wrong


def test_sweep_names_the_line_that_it_left_out(deployed: Project) -> None:
    with_bad_line(measured_trials(), deployed.results, 2)
    done = deployed.sweep(nodes=[1, 2], engines=["horovod-gloo"])
    assert done.returncode == 0, last_line(done)
    assert names_bad_line(done, 2), "does not say that line 2 was left out"
