"""Feature slurm on three nodes with a real Slurm: what sweeps, comm and runs leave in its queue, and what they measure.

The tests depend on each other and run in order; the cluster is always removed at the end.
"""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_nodes
from environments import BIN, cluster, leftovers, podman, run
from slurm_nodes import NODES, Site, Sweep, wait, write_plan

from bench.plan import fit
from bench.sweep import executors, run_folder, runner
from cluster.core.state import State
from cluster.terraform import read_output

ENV = "slurmtest"
BOTH = ["horovod-mpi", "horovod-gloo"]
PAIRS = 5
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module", autouse=True)
def site() -> Iterator[Site]:
    with slurm_nodes.deployed(ENV, 88, slurm_parameters=slurm_nodes.PREEMPTING) as found:
        yield found
    assert leftovers(ENV) == []


def test_deploy_starts_slurm_on_all_nodes(site: Site) -> None:
    assert site.head("sinfo -h -N -p main -o %N=%T").split() == [f"{node}=idle" for node in NODES]
    assert sorted(site.head("srun -N 3 hostname", "alice").split()) == NODES
    assert cluster("status", env=ENV).returncode == 0
    # Nothing changes in a second deploy.
    assert "ansible changed 0 things" in cluster("deploy", env=ENV).stdout


def measured(kind: str, plan: Path, name: str) -> dict:
    """The trial of a sweep through this executor."""
    contract = read_output(State(ENV)).model_copy(update={"executor": kind})
    values = fit.load(str(plan), contract)
    folder = run_folder.open_run(ENV, name, values)
    folder.prepare(values.model_dump(), {})
    runner.Sweep(values, folder, executors.make(contract, ENV), {}, None, check=False).run()
    (trial,) = [json.loads(line) for line in (folder.folder / "trials.jsonl").read_text().splitlines()]
    assert trial["status"] == "ok", trial["error"]
    return trial


@pytest.mark.parametrize("engine", BOTH)
def test_steps_are_as_fast_through_slurm_as_over_ssh(site: Site, tmp_path: Path, engine: str) -> None:
    plan = write_plan(tmp_path, engines=[engine])
    steps: dict[str, list[float]] = {"slurm": [], "ssh": []}
    for number in range(PAIRS):
        for kind in ("slurm", "ssh") if number % 2 else ("ssh", "slurm"):
            trial = measured(kind, plan, f"{engine}-{kind}-{number}")
            assert (trial["job"] is None) == (kind == "ssh")
            steps[kind].append(trial["step_ms"]["median"])
    ratios = [slurm / ssh for slurm, ssh in zip(steps["slurm"], steps["ssh"], strict=True)]
    print(f"{engine}: step through Slurm over step over SSH {statistics.median(ratios):.3f}, {steps}")
    inside = all(
        min(steps[other]) <= statistics.median(steps[kind]) <= max(steps[other])
        for kind, other in (("slurm", "ssh"), ("ssh", "slurm"))
    )
    assert inside or abs(statistics.median(ratios) - 1) <= 0.03, ratios


def test_job_of_a_second_user_waits_and_records_do_not_mix(site: Site, tmp_path: Path) -> None:
    sweep = Sweep(ENV, write_plan(tmp_path, engines=BOTH), "shared")
    sweep.wait_until_it_measures()
    first = site.running("bench-")
    other = site.submit("-N 3 --exclusive --wrap 'sleep 5'")
    time.sleep(2)
    assert site.jobs()[other] == "PENDING"
    assert site.jobs()[first] == "RUNNING"
    text = sweep.end()
    assert sweep.process.returncode == 0, text
    wait(lambda: site.jobs()[other] == "COMPLETED", 60, "the other job did not run")
    # ISO times.
    assert site.job(other)["StartTime"] >= site.job(first)["EndTime"]
    trials = sweep.trials()
    assert [trial["point"]["engine"] for trial in trials] == BOTH
    assert trials[0]["job"] == first
    assert trials[1]["job"] not in (first, other)
    assert "node-hours" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("engine", BOTH)
def test_stopped_sweep_leaves_no_job_and_no_rank(
    site: Site, tmp_path: Path, engine: str, number: signal.Signals
) -> None:
    sweep = Sweep(ENV, write_plan(tmp_path, engines=[engine], seconds=60), f"stopped-{engine}-{number}")
    sweep.wait_until_it_measures()
    job = site.running("bench-")
    assert site.ranks()
    sweep.process.send_signal(number)
    sweep.end()
    wait(lambda: not site.jobs("running,pending,completing") and not site.ranks(), 15, "a job or a rank is left")
    assert site.jobs()[job] == "CANCELLED"


def test_preempted_job_is_requested_again_and_its_trials_are_completed(site: Site, tmp_path: Path) -> None:
    sweep = Sweep(ENV, write_plan(tmp_path, seconds=15), "preempted")
    sweep.wait_until_it_measures()
    first = site.running("bench-")
    urgent = site.submit("-p urgent -N 3 --exclusive --wrap 'sleep 3'")
    text = sweep.end()
    assert sweep.process.returncode == 0, text
    assert (site.jobs()[first], site.jobs()[urgent]) == ("PREEMPTED", "COMPLETED")
    (trial,) = sweep.trials()
    assert (trial["status"], trial["job"] in (first, urgent)) == ("ok", False)


def test_node_lost_in_a_job_is_named_and_the_sweep_goes_on(site: Site, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, nodes=[3, 2], seconds=20)
    sweep = Sweep(ENV, plan, "lost")
    sweep.wait_until_it_measures()
    podman("stop", "-t", "0", f"{ENV}-w2")
    text = sweep.end()
    assert sweep.process.returncode == 1, text
    assert "node w2 is offline" in text
    lost, rest = sweep.trials()
    assert (lost["status"], lost["error_node"], lost["point"]["nodes"]) == ("failed", "w2", 3)
    assert (rest["status"], rest["point"]["nodes"]) == ("ok", 2)
    cluster("deploy", env=ENV)
    site.wait_idle()
    again = Sweep(ENV, plan, "lost")
    text = again.end()
    assert again.process.returncode == 0, text
    assert len(again.trials()) == 3


def test_node_that_does_not_answer_slurm_is_named_instead_of_waited_for(site: Site, tmp_path: Path) -> None:
    site.head("scontrol update nodename=w2 state=drain reason=test")
    sweep = Sweep(ENV, write_plan(tmp_path, nodes=[3, 2], seconds=5), "drained")
    text = sweep.end()
    site.head("scontrol update nodename=w2 state=resume")
    assert sweep.process.returncode == 1, text
    failed, rest = sweep.trials()
    assert (failed["status"], rest["status"]) == ("failed", "ok")
    assert "Slurm does not give out w2" in failed["error"]
    site.wait_idle()


def test_comm_and_a_users_script_take_their_nodes_from_the_queue(site: Site, tmp_path: Path) -> None:
    before = set(site.jobs())
    run(
        BIN / "bench", "comm", "--env", ENV, "--engine", "horovod-mpi", "--from", "64K", "--to", "64K", "--seconds", "1"
    )
    made = set(site.jobs()) - before
    assert made and {site.jobs()[one] for one in made} == {"COMPLETED"}
    (tmp_path / "train.py").write_text("import os; print('in job', os.environ['SLURM_JOB_ID'], flush=True)")
    done = run(BIN / "bench", "run", "--env", ENV, "--folder", tmp_path, "--all-ranks", "--", "python", "train.py")
    (job,) = set(site.jobs()) - before - made
    assert done.stdout.count(f"in job {job}") == 3, done.stdout


def test_scaling_keeps_slurm_right(site: Site) -> None:
    cluster("scale", "--nodes", "2", env=ENV)
    assert site.head("sinfo -h -o '%P %N' -p main").split() == ["main*", "head,w1"]
    assert len(site.head("srun -N 2 hostname", "alice").split()) == 2
    cluster("scale", "--nodes", "3", env=ENV)
    site.add_alice()
    site.wait_idle()
    assert len(site.head("srun -N 3 hostname", "alice").split()) == 3


def test_feature_switched_off_leaves_nothing_and_sweeps_go_over_ssh(site: Site, tmp_path: Path) -> None:
    site.change(lambda content: content["cluster"]["features"].update(slurm=False))
    cluster("deploy", env=ENV)
    for node in NODES:
        assert "slurm" not in site.on(node, "dpkg --get-selections")
        assert site.on(node, "ls -d /etc/slurm /etc/munge /var/lib/slurm /run/slurmd 2> /dev/null; true") == ""
        assert site.on(node, "pgrep -x 'munged|slurmd|slurmctld|slurmstepd'; true") == ""
    sweep = Sweep(ENV, write_plan(tmp_path, seconds=5), "off")
    text = sweep.end()
    assert sweep.process.returncode == 0, text
    assert sweep.trials()[0]["job"] is None
