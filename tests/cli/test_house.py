"""What `bench` and `cluster` do from the command line, without a cluster.

The tests start commands and read files. They import nothing of the project, so modules can move. Where a command needs
an environment, it runs in a copy of the project under tmp_path. Where it needs a deployed cluster, a Terraform state
and a stand-in for ssh take its place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv/bin"
RUNS = ROOT / "tests/fixtures/runs"
ENV = "house"
# Linux: MAX_ARG_STRLEN, with the NUL that ends an argument.
LONGEST_ARGUMENT = 131_072
# Every field of cluster.yml that has no default.
REQUIRED = {
    "name": ENV,
    "provider": "local",
    "nodes": 2,
    "networks": {"management": "10.99.0.0/24", "fabric": "10.99.1.0/24"},
    "admin_cidrs": ["10.99.0.1/32"],
    "fabrics": {"1g": {"rate_gbps": 1}},
    "active_fabric": "1g",
}
PREDICT = ["predict", "--gpu", "v100", "--gpus", "8", "--gpus-per-node", "4", "--rate-gbps", "10", "--json"]
# The sweep keeps a launch's standard input open, so the stand-in reads until nothing has come for a second.
SSH = """#!{python} -IS
import json, os, select, sys
given = b""
while select.select([0], [], [], 1.0)[0] and (more := os.read(0, 1 << 16)):
    given += more
with open(f"{calls}/{{os.getpid()}}.json", "w") as file:
    json.dump({{"argv": sys.argv, "stdin": given.decode("latin-1")}}, file)
"""
pytestmark = pytest.mark.timeout(120)


def run(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**inherited, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return f"exit {done.returncode}: {lines[-1] if lines else 'no output'}"


def copy_project(target: Path) -> Path:
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        if not os.path.lexists(ROOT / name):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@dataclass
class Project:
    """A copy of the project with one environment. `bench` and `cluster` are the copy's, from the project's own venv."""

    folder: Path
    tmp: Path

    def run(self, command: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        path = f"{self.tmp / 'bin'}:{os.environ['PATH']}"
        code = f"{self.folder}:{self.folder / 'src'}"
        return run(BIN / command, *words, cwd=self.folder, PATH=path, PYTHONPATH=code)

    @property
    def variables(self) -> Path:
        return self.folder / "inventories" / ENV / "group_vars/all"

    @property
    def results(self) -> Path:
        return self.folder / "results" / ENV / "plan"

    def deploy(self) -> None:
        """Leave what a deploy leaves: a Terraform state. And put the stand-in for ssh in front of PATH."""
        state = self.folder / ".state" / ENV
        state.mkdir(parents=True)
        value = contract(state)
        content = {
            **{"version": 4, "terraform_version": "1.7.0", "serial": 1, "lineage": ENV, "resources": []},
            "outputs": {"cluster": {"value": value, "type": terraform_type(value)}},
        }
        (state / "terraform.tfstate").write_text(json.dumps(content))
        for name in ("bin", "calls"):
            (self.tmp / name).mkdir()
        ssh = self.tmp / "bin/ssh"
        ssh.write_text(SSH.format(python=sys.executable, calls=self.tmp / "calls"))
        ssh.chmod(0o755)

    def calls(self) -> list[dict[str, Any]]:
        """Every call of ssh: its arguments and its standard input."""
        return [json.loads(path.read_text()) for path in (self.tmp / "calls").glob("*.json")]

    def sweep(self, **changes: Any) -> subprocess.CompletedProcess[str]:
        plan = {"nodes": [2], "batches": [32], "fabrics": ["1g"], "engines": ["horovod-mpi"], **changes}
        (self.tmp / "plan.yml").write_text(json.dumps(plan))
        return self.run("bench", "sweep", "--env", ENV, "--plan", self.tmp / "plan.yml", "--json")

    def trials(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.results / "trials.jsonl").read_text().splitlines()]


def contract(state: Path) -> dict[str, Any]:
    """Terraform's output for two nodes of provider local on a shaped fabric."""
    nodes = {
        name: {
            **{"index": index, "role": role, "management_address": f"10.99.0.{10 + index}"},
            **{"fabric_addresses": {"1g": f"10.99.1.{10 + index}"}, "gpus": 0, "gpu_model": "none"},
        }
        for index, (name, role) in enumerate({"head": "head", "w1": "worker"}.items())
    }
    fabric = {"interface": "fabric0", "subnet": "10.99.1.0/24", "rate_gbps": 1, "transport": "tcp", "shaped": True}
    return {
        **{"name": ENV, "provider": "local", "active_fabric": "1g", "nodes": nodes, "fabrics": {"1g": fabric}},
        "ssh": {"user": "ops", "key": str(state / "id"), "known_hosts": str(state / "known_hosts"), "jump_host": None},
        "storage": {"backend": "none", "server": "head", "path": "/shared"},
    }


def terraform_type(value: Any) -> Any:
    if isinstance(value, dict):
        return ["object", {name: terraform_type(inner) for name, inner in value.items()}]
    return "bool" if isinstance(value, bool) else "number" if isinstance(value, int) else "string"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(copy_project(tmp_path / "project"), tmp_path)
    (made.folder / ".venv").symlink_to(ROOT / ".venv")
    made.variables.mkdir(parents=True)
    (made.variables / "cluster.yml").write_text(json.dumps({"cluster": REQUIRED}))
    return made


@pytest.fixture
def deployed(project: Project) -> Project:
    project.deploy()
    return project


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


@dataclass
class Installed:
    """The wheel in a venv of its own, outside any checkout."""

    folder: Path

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))

    def run(self, command: str, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        return run(self.folder / "bin" / command, *words, cwd=cwd)

    def files(self) -> set[Path]:
        return {path for path in self.site_packages.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    tmp = tmp_path_factory.mktemp("wheel")
    made = Installed(tmp / "venv")
    build = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp]
    target = ["--python", made.folder / "bin/python", "install", "--quiet", "--no-deps", "--no-index"]
    run(BIN / "pip", "wheel", *build, copy_project(tmp / "project"), cwd=tmp).check_returncode()
    run(BIN / "python", "-m", "venv", "--without-pip", made.folder, cwd=tmp).check_returncode()
    run(BIN / "pip", *target, *tmp.glob("*.whl"), cwd=tmp).check_returncode()
    # A path in a .pth file makes packages visible but not their .pth files: the editable install stays out of sight.
    site_packages = next((ROOT / ".venv").glob("lib/python3*/site-packages"))
    (made.site_packages / "third-party.pth").write_text(f"{site_packages}\n")
    found = run(made.folder / "bin/python", "-c", "import bench; print(bench.__file__)", cwd=tmp).stdout
    assert found.startswith(str(made.folder)), found
    return made


def test_installed_bench_needs_no_checkout(installed: Installed, tmp_path: Path) -> None:
    copied = shutil.copytree(RUNS / "compute-ib", tmp_path / "run")
    empty = tmp_path / "empty"
    empty.mkdir()
    before = installed.files()
    commands = {
        "--help": ["--help"],
        "predict": PREDICT,
        "plan transfer": ["plan", "transfer", "--dataset-tb", "1"],
        "report": ["report", copied],
        "explain": ["explain", copied],
        "compare": ["compare", copied, copied],
        "export": ["export", copied, "--format", "json"],
        "data make": ["data", "make", "--images", "2", "--out", tmp_path / "data"],
    }
    broken = {}
    for name, words in commands.items():
        done = installed.run("bench", *words, cwd=empty)
        if done.returncode or "Traceback" in done.stderr:
            broken[name] = last_line(done)
    # There is no environment here, which is the only thing that may be wrong.
    done = installed.run("bench", "sweep", "--plan", "quick", "--dry-run", cwd=empty)
    refused = done.returncode == 2 and "environment" in done.stderr and done.stderr.count("\n") == 1
    if done.returncode and not refused:
        broken["sweep --dry-run"] = last_line(done)
    assert not broken, broken
    assert installed.files() == before
    assert list(empty.iterdir()) == []


def test_installed_bench_takes_environments_from_the_current_folder(installed: Installed, tmp_path: Path) -> None:
    # A cluster.yml for AWS is checked against the instance types that come with the package.
    place = tmp_path / "inventories/aws/group_vars/all"
    place.mkdir(parents=True)
    shutil.copy(ROOT / "inventories/aws/group_vars/all/cluster.yml", place)
    done = installed.run("bench", "sweep", "--env", "aws", "--plan", "quick", "--dry-run", "--json", cwd=tmp_path)
    assert done.returncode == 0, last_line(done)
    assert len(json.loads(done.stdout)["trials"]) == 18


def test_installed_bench_writes_results_into_the_current_folder(installed: Installed, tmp_path: Path) -> None:
    before = installed.files()
    done = installed.run("bench", "report", RUNS / "compute-ib", RUNS / "straggler", cwd=tmp_path)
    assert done.returncode == 0, last_line(done)
    added = [str(path.relative_to(installed.site_packages)) for path in installed.files() - before]
    assert not added, f"written into site-packages: {', '.join(sorted(added))}"
    assert (tmp_path / "results/side-by-side/report.html").is_file()


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


def test_new_trials_record_their_transport_and_old_ones_are_not_repeated(deployed: Project) -> None:
    old = (RUNS / "network-1g/trials.jsonl").read_text().splitlines()[:2]
    deployed.results.mkdir(parents=True)
    (deployed.results / "trials.jsonl").write_text("\n".join(old) + "\n")
    # Both old trials are of batch 32, on one node and on two.
    done = deployed.sweep(nodes=[1, 2], batches=[32, 48])
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
    old = (RUNS / "network-1g/trials.jsonl").read_text().splitlines()[:2]
    with_bad_line(old, deployed.results, 2)
    done = deployed.sweep(nodes=[1, 2])
    assert done.returncode == 0, last_line(done)
    assert names_bad_line(done, 2), "does not say that line 2 was left out"
