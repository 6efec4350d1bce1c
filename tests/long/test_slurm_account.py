"""ENV=slurm: an ordinary account without sudo measures through the login host of a real Slurm, and cleans up.

The Slurm is that of three local nodes with accounting: associations are enforced, and limits of partitions. The tests
depend on each other and run in order; the cluster is always removed at the end.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_nodes
import yaml
from environments import ROOT, cluster, leftovers, run
from slurm_nodes import NODES, Site, Sweep, wait, write_plan

from cluster.core.state import State
from cluster.terraform import read_output

SITE, ENV = "slurmsite", "slurmaccount"
FOLDER = "/shared/alice/bench"
ENGINES = ["horovod-gloo", "ddp"]
SITE_SETTINGS = {
    "slurm_accounting": True,
    "slurm_max_time": "60",
    "slurm_parameters": {**slurm_nodes.PREEMPTING, "AccountingStorageEnforce": "associations"},
    "ssh_allowed_users": ["ops", "horovod", "alice"],
}
PLAN = {"fabrics": ["net"], "engines": ["horovod-gloo"]}
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    keys = tmp_path_factory.mktemp("keys")
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / "id")
    with slurm_nodes.deployed(SITE, 89, **SITE_SETTINGS) as found, pytest.MonkeyPatch.context() as patch:
        give_account(found, (keys / "id.pub").read_text())
        make_env(found, keys)
        # Its key is in no known_hosts of this machine.
        (keys / "ssh").write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh")} -o UserKnownHostsFile={ROOT}/.state/{SITE}/known_hosts "$@"\n'
        )
        (keys / "ssh").chmod(0o755)
        patch.setenv("PATH", str(keys), prepend=":")
        try:
            yield found
        finally:
            cluster("destroy", "--yes", env=ENV, ok=False)
            shutil.rmtree(ROOT / "inventories" / ENV)
            shutil.rmtree(ROOT / "results" / ENV, ignore_errors=True)
    assert leftovers(SITE) == []


def give_account(site: Site, key: str) -> None:
    """What the administrators of a site do for a new user."""
    site.head(
        "install -d -o alice -g alice /home/alice/.ssh /shared/alice && "
        f"echo '{key.strip()}' > /home/alice/.ssh/authorized_keys && "
        "{ sacctmgr -i add account lab1; sacctmgr -i add user alice account=lab1; true; }"
    )
    assert "is not allowed to run sudo" in site.head("sudo -l -U alice 2>&1; true")


def make_env(site: Site, keys: Path) -> None:
    folder = ROOT / "inventories" / ENV
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "inventories/slurm", folder, symlinks=True)
    path = folder / "group_vars/all/cluster.yml"
    content = yaml.safe_load(path.read_text())
    content["cluster"] |= {"name": ENV, "nodes": 3, "gpus_per_node": 0}
    content["cluster"]["fabrics"] = {"net": {"rate_gbps": 1, "transport": "tcp", "shaped": False}}
    content["cluster"]["slurm"] = {
        **{"login": f"alice@{read_output(State(SITE)).address('head')}", "key": str(keys / "id")},
        **{"folder": FOLDER, "python": "/opt/horovod/bin/python", "account": "lab1", "minutes": 30},
        **{"subnets": {"net": f"10.{site.second}.1.0/24"}, "poll_seconds": 1},
    }
    path.write_text(yaml.safe_dump(content))


def settings(**changes: object) -> None:
    path = ROOT / "inventories" / ENV / "group_vars/all/cluster.yml"
    content = yaml.safe_load(path.read_text())
    content["cluster"]["slurm"] |= changes
    path.write_text(yaml.safe_dump(content))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": "gpu"}, "invalid partition specified: gpu"),
        ({"account": "lab2"}, "Invalid account or account/partition combination specified"),
        ({"minutes": 90}, "Requested time limit is invalid (missing or exceeds some limit)"),
        ({"constraint": "skylake"}, "Invalid feature specification"),
    ],
)
def test_mistake_is_one_line_in_slurms_words_and_makes_nothing(site: Site, changes: dict, words: str) -> None:
    settings(**changes)
    done = cluster("deploy", env=ENV, ok=False)
    settings(partition=None, account="lab1", minutes=30, constraint=None)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "Slurm refuses" in line]
    assert words in line
    assert "Traceback" not in done.stderr
    assert site.jobs() == {}
    assert site.head(f"ls -A {Path(FOLDER).parent}") == ""


def test_deploy_looks_at_all_nodes_in_a_job_and_changes_only_its_folder(site: Site) -> None:
    before = site.head("cd /home/alice && find . -newer .ssh | sort")
    done = cluster("deploy", env=ENV)
    assert "3 jobs can be started" in done.stdout
    shown = cluster("status", env=ENV).stdout
    assert all(f"{node}: Python 3" in shown for node in NODES), shown
    assert site.head("cd /home/alice && find . -newer .ssh | sort") == before
    assert site.head(f"ls -A {Path(FOLDER).parent}") == Path(FOLDER).name
    assert site.head("sacct -nPX -u alice -o Account,State").splitlines() == ["lab1|COMPLETED"]


def test_bench_runs_as_jobs_of_the_account(site: Site, tmp_path: Path) -> None:
    sweep = Sweep(ENV, write_plan(tmp_path, **PLAN | {"engines": ENGINES, "nodes": [2, 3]}), "both")
    text = sweep.end()
    assert sweep.process.returncode == 0, text
    assert "4 jobs, about" in text and "node-hours" in text
    trials = sweep.trials()
    assert [(one["point"]["engine"], one["point"]["nodes"]) for one in trials] == [
        (engine, nodes) for engine in ENGINES for nodes in (2, 3)
    ]
    jobs = [one["job"] for one in trials]
    found = site.head(f"sacct -nPX -j {','.join(jobs)} -o JobID,User,Account,NNodes,State").splitlines()
    assert found == [f"{job}|alice|lab1|{nodes}|COMPLETED" for job, nodes in zip(jobs, (2, 3, 2, 3), strict=True)]


def test_interrupt_cancels_the_job_and_leaves_no_rank(site: Site, tmp_path: Path) -> None:
    sweep = Sweep(ENV, write_plan(tmp_path, **PLAN, seconds=60), "interrupted")
    sweep.wait_until_it_measures()
    job = site.running(ENV)
    sweep.process.send_signal(signal.SIGINT)
    sweep.end()
    wait(lambda: site.jobs()[job] == "CANCELLED" and not site.ranks(), 20, "a job or a rank is left")


def test_job_outlives_bench_and_the_same_command_collects_it(site: Site, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, **PLAN, batches=[32, 64], seconds=15)
    sweep = Sweep(ENV, plan, "cut")
    sweep.wait_until_it_measures()
    job = site.running(ENV)
    sweep.process.kill()
    sweep.end()
    time.sleep(3)
    assert site.jobs()[job] == "RUNNING"
    wait(lambda: site.jobs()[job] == "COMPLETED", 120, "the job did not go on")
    known = set(site.jobs())
    again = Sweep(ENV, plan, "cut")
    text = again.end()
    assert again.process.returncode == 0, text
    assert {(one["status"], one["job"]) for one in again.trials()} == {("ok", job)}
    assert set(site.jobs()) == known


def test_login_host_that_does_not_answer_for_a_while_loses_nothing(site: Site, tmp_path: Path) -> None:
    sweep = Sweep(ENV, write_plan(tmp_path, **PLAN, seconds=20), "silent")
    sweep.wait_until_it_measures()
    job = site.running(ENV)
    site.head("systemctl stop ssh.socket ssh.service")
    time.sleep(12)
    site.head("systemctl start ssh.service")
    text = sweep.end()
    assert sweep.process.returncode == 0, text
    assert [(one["status"], one["job"]) for one in sweep.trials()] == [("ok", job)]


def test_job_ended_by_its_time_limit_is_resumed(site: Site, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, **PLAN, batches=[32, 64, 96, 128], seconds=60)
    sweep = Sweep(ENV, plan, "limit")
    sweep.wait_until_it_measures()
    job = site.running(ENV)
    # Its end is then less than 90 s away: Slurm sends the signal.
    site.head(f"scontrol update jobid={job} timelimit=2")
    text = sweep.end()
    assert sweep.process.returncode == 1, text
    assert "its time limit of 30 minutes is near; run the same command again to go on" in text
    assert "failed" in {one["status"] for one in sweep.trials()}
    again = Sweep(ENV, plan, "limit")
    text = again.end(400)
    assert again.process.returncode == 0, text
    assert again.trials()[-1]["job"] != job


def test_preempted_job_is_requeued_and_its_trials_are_completed(site: Site, tmp_path: Path) -> None:
    sweep = Sweep(ENV, write_plan(tmp_path, **PLAN, seconds=15), "preempted")
    sweep.wait_until_it_measures()
    job = site.running(ENV)
    urgent = site.submit("-p urgent -N 3 --exclusive --wrap 'sleep 3'", user="horovod")
    text = sweep.end(400)
    assert sweep.process.returncode == 0, text
    assert site.jobs()[urgent] == "COMPLETED"
    assert [(one["status"], one["job"]) for one in sweep.trials()] == [("ok", job)]
    assert site.job(job)["Restarts"] == "1"


def test_deploy_builds_torch_and_horovod_in_a_job(site: Site, tmp_path: Path) -> None:
    settings(build=True, python="/usr/bin/python3")
    cluster("deploy", env=ENV)
    assert site.head(f"{FOLDER}/venv/bin/python -c 'import horovod; print(horovod.__version__)'", "alice")
    assert site.head(f"ls -d {FOLDER}/wheels", ok=False) == ""
    sweep = Sweep(ENV, write_plan(tmp_path, **PLAN, nodes=[2]), "built")
    text = sweep.end()
    assert sweep.process.returncode == 0, text
    jobs = site.jobs()
    assert f"are in {FOLDER}/venv already" in cluster("deploy", env=ENV).stdout
    # Nothing has changed: no job.
    assert site.jobs() == jobs


def test_destroy_removes_the_folder_and_leaves_other_jobs_and_results(site: Site) -> None:
    other = site.submit("-N 1 --wrap 'sleep 300'")
    wait(lambda: site.jobs()[other] == "RUNNING", 60, "the other job did not start")
    cluster("destroy", "--yes", env=ENV)
    assert site.jobs()[other] == "RUNNING"
    site.head(f"scancel {other}")
    assert site.head(f"ls -A {Path(FOLDER).parent}") == ""
    assert (ROOT / "results" / ENV / "both/trials.jsonl").exists()
    assert not (ROOT / ".state" / ENV).exists()
