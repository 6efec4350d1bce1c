"""ENV=slurm: batch scripts, what a cluster accepts, and the life of a job, with stand-ins for Slurm's commands.

UPDATE_GOLDEN=1 rewrites the golden files. tests/long/test_slurm_account.py uses a real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_sweep import CLUSTER, load, report

from bench.plan import unfold
from bench.results import store
from bench.sweep import executors, runner
from bench.sweep.attempt import Attempt
from bench.sweep.launch import Launch, SpecFile
from bench.sweep.progress import Progress
from bench.worker import protocol, slurm_rank
from bench.worker.protocol import Allocation, Started
from cluster.core import config, worker_files
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress as CoreProgress
from cluster.core.slurm_section import Slurm
from cluster.core.state import State
from cluster.providers.slurm import queue, script
from cluster.providers.slurm.jobs import Jobs
from cluster.providers.slurm.provider import Slurm as Provider
from cluster.providers.slurm.script import Request

GOLDEN = Path(__file__).parent / "golden"
RECORDED = Path(__file__).parent / "recorded"
PLAIN = {"login": "local", "folder": "/scratch/me/bench", "python": "/home/me/venv/bin/python"}
FULL = {
    **PLAIN,
    **{"partition": "gpu", "account": "lab1", "qos": "short", "constraint": "skylake&ib", "reservation": "course"},
    **{"minutes": 30, "options": ["--mem=0", "--gres-flags=enforce-binding"], "modules": ["gcc/13", "cuda/13.0"]},
}
REQUESTS = {
    "plain": (PLAIN, Request("x-1", "/scratch/me/bench/jobs/x-1", 2, 1, ("python", "-c", "print('a b')"))),
    "full": (
        FULL,
        Request("x-2", "/scratch/me/bench/jobs/x-2", 4, 4, ("true",), 4, environment={"A": "1", "B": "it's"}),
    ),
}
# A cluster of one machine: a job's state is a file, and its script runs in the background.
STANDINS = {
    "sbatch": """
case "$*" in *--test-only*) [ ! -e $FAKE/refuses ] || { cat $FAKE/refuses >&2; exit 1; }; exit 0;; esac
[ ! -e $FAKE/refuses ] || { cat $FAKE/refuses >&2; exit 1; }
n=$(($(ls $FAKE/*.state 2> /dev/null | wc -l) + 1))
echo RUNNING > $FAKE/$n.state
cp "$2" $FAKE/$n.sh
(setsid bash $FAKE/$n.sh > /dev/null 2>&1 < /dev/null; [ $? = 0 ] && s=COMPLETED || s=FAILED
 grep -q RUNNING $FAKE/$n.state && echo $s > $FAKE/$n.state) > /dev/null 2>&1 &
echo $n
""",
    "squeue": """
for word; do case $word in --jobs=*) n=${word#*=};; esac; done
echo "$(cat $FAKE/$n.state)|None|N/A"
""",
    "scancel": "echo $1 >> $FAKE/cancelled; echo CANCELLED > $FAKE/$1.state; pkill -f $FAKE/$1.sh; true\n",
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"\n',
}


class Fake:
    """Stand-ins on PATH, and an environment whose jobs use them."""

    def __init__(self, folder: Path) -> None:
        self.fake, self.shared, self.state = folder / "fake", folder / "shared", folder / "state"
        self.fake.mkdir()
        self.state.mkdir()
        self.lines: list[str] = []
        for name, text in STANDINS.items():
            (self.fake / name).write_text(f"#!/bin/bash\n{text}")
            (self.fake / name).chmod(0o755)

    def jobs(self, **changes: object) -> Jobs:
        given = {**PLAIN, "folder": str(self.shared), "poll_seconds": 0.2, **changes}
        return Jobs(Slurm.model_validate(given), self.state, "none")

    def request(self, *command: str) -> Request:
        return Request("x-1", f"{self.shared}/jobs/x-1", 1, 1, command)

    def run(self, *command: str, jobs: Jobs | None = None) -> None:
        (jobs or self.jobs()).run(self.request(*command), {"spec.json": b"{}"}, self.lines.append)

    def set_state(self, job: int, state: str) -> None:
        (self.fake / f"{job}.state").write_text(state)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = Fake(tmp_path)
    monkeypatch.setenv("PATH", f"{found.fake}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(found.fake))
    return found


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("name", REQUESTS)
def test_batch_script_equals_the_golden_file(name: str) -> None:
    section, request = REQUESTS[name]
    text = script.render(Slurm.model_validate(section), request, "a100")
    golden = GOLDEN / f"sbatch-{name}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_type_of_gpus_is_requested_only_if_there_is_one() -> None:
    assert script.gpu_option(4, "a100") == ["--gpus-per-node=a100:4"]
    assert script.gpu_option(4, "none") == ["--gpus-per-node=4"]
    assert script.gpu_option(0, "a100") == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("partition", "gpu; rm -rf /"), ("options", ["-x"]), ("folder", "/scratch"), ("folder", "~/x"), ("minutes", 2)],
)
def test_values_that_could_end_a_directive_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        Slurm.model_validate({**PLAIN, field: value})


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("30:00", 30), ("01:30:00", 90), ("1-00:00:00", 1440), ("2-12", 3600), ("15", 15), ("UNLIMITED", None)],
)
def test_times_of_slurm_are_read(text: str, minutes: float | None) -> None:
    assert queue.minutes(text) == minutes


def test_output_of_a_job_arrives_once_and_in_order(slurm: Fake) -> None:
    slurm.run("bash", "-c", "for i in 1 2 3; do echo line $i; sleep 0.3; done")
    assert slurm.lines == ["line 1", "line 2", "line 3"]
    assert slurm.jobs().ledger.open() == {}


def test_job_starts_in_its_folder_beside_the_worker(slurm: Fake) -> None:
    jobs = slurm.jobs()
    slurm.run("bash", "-c", f"cat spec.json; echo; ls {jobs.worker}", jobs=jobs)
    assert slurm.lines[0] == "{}"
    assert "__main__.py" in slurm.lines
    assert jobs.worker.endswith(worker_files.digest())


def test_failed_job_says_why(slurm: Fake) -> None:
    with pytest.raises(InfraError, match="Slurm job 1 failed: ImportError: no torch"):
        slurm.run("bash", "-c", "echo ImportError: no torch >&2; exit 1")


def test_job_goes_on_without_us_and_the_next_run_collects_it(slurm: Fake) -> None:
    before = slurm.jobs().submit(slurm.request("bash", "-c", "echo one; sleep 1; echo two"), {})
    # Nobody has seen its end.
    wait_until(lambda: "COMPLETED" in (slurm.fake / f"{before}.state").read_text())
    slurm.run("echo", "never started")
    assert slurm.lines == ["one", "two"]
    assert len(list(slurm.fake.glob("*.state"))) == 1
    slurm.run("echo", "started")
    assert slurm.lines[2:] == ["started"]


def test_stopped_run_cancels_its_job(slurm: Fake) -> None:
    jobs = slurm.jobs()
    threading.Timer(1, jobs.stop.set).start()
    with pytest.raises(InfraError, match="stopped; Slurm job 1 is cancelled"):
        slurm.run("sleep", "60", jobs=jobs)
    assert (slurm.fake / "cancelled").read_text() == "1\n"
    assert jobs.ledger.open() == {}


def test_requeued_job_starts_its_output_again(slurm: Fake) -> None:
    """The output of the second attempt follows that of the first; the sweep skips trials that it has."""
    jobs = slurm.jobs()

    def requeue() -> None:
        wait_until(lambda: slurm.lines)
        slurm.set_state(1, "PENDING")
        subprocess.run(["pkill", "-f", f"{slurm.fake}/1.sh"], check=False)
        time.sleep(1)
        slurm.set_state(1, "RUNNING")
        env = {**os.environ, "SLURM_RESTART_COUNT": "1"}
        code = subprocess.run(["bash", slurm.fake / "1.sh"], env=env).returncode
        slurm.set_state(1, "COMPLETED" if code == 0 else "FAILED")

    thread = threading.Thread(target=requeue)
    thread.start()
    slurm.run("bash", "-c", 'echo attempt; [ -n "$SLURM_RESTART_COUNT" ] || sleep 30', jobs=jobs)
    thread.join()
    assert slurm.lines == ["attempt", "attempt"]


def test_requeues_are_bounded(slurm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    with pytest.raises(InfraError, match="Slurm job 1 ended: it was requeued more than 2 times"):
        slurm.run("echo", "never")
    assert slurm.lines == []


def test_time_limit_ends_the_step_with_its_output_complete(slurm: Fake) -> None:
    def warn() -> None:
        wait_until(lambda: slurm.lines)
        subprocess.run(["pkill", "-USR1", "-f", f"bash {slurm.fake}/1.sh"], check=False)

    threading.Thread(target=warn).start()
    with pytest.raises(InfraError, match="its time limit of 60 minutes is near; run the same command again to go on"):
        slurm.run("bash", "-c", "trap 'echo last; exit 1' TERM; echo first; sleep 60 & wait")
    assert slurm.lines == ["first", "last"]


def test_refused_job_is_reported_in_slurms_own_words(slurm: Fake) -> None:
    (slurm.fake / "refuses").write_text("sbatch: error: Batch job submission failed: Invalid account\n")
    with pytest.raises(UserError, match="Invalid account"):
        slurm.run("true")
    assert slurm.jobs().ledger.open() == {}
    with pytest.raises(UserError, match=r"Slurm refuses a job of 1 nodes: .*Invalid account"):
        slurm.jobs().test(slurm.request("true"))


def test_destroy_cancels_recorded_jobs_and_removes_our_folder_only(slurm: Fake) -> None:
    jobs = slurm.jobs()
    jobs.submit(slurm.request("sleep", "60"), {})
    slurm.set_state(2, "RUNNING")
    jobs.destroy()
    assert (slurm.fake / "cancelled").read_text() == "1\n"
    assert not slurm.shared.exists()
    jobs.destroy()


def test_folder_of_somebody_else_is_neither_used_nor_removed(slurm: Fake, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    jobs = slurm.jobs(folder=str(other))
    with pytest.raises(UserError, match=r"cluster\.slurm\.folder: .* is not this environment's"):
        jobs.claim()
    with pytest.raises(UserError, match=r"cluster\.slurm\.folder"):
        slurm.run("true", jobs=jobs)
    jobs.destroy()
    assert (other / "thesis.tex").exists()


class Answers:
    """A login host that knows one partition and one account."""

    def __init__(self, accounts: str = "") -> None:
        self.accounts = accounts

    def text(self, words: list[str]) -> str:
        return (RECORDED / "scontrol-partition-22.05.txt").read_text()

    def run(self, words: list[str]) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(words, 0, self.accounts.encode(), b"")


@pytest.mark.parametrize(
    ("changes", "nodes", "named"),
    [
        ({"partition": "gpu"}, 2, "slurm.partition: gpu: no such partition; choose one of main, all"),
        ({}, 9, "cluster.nodes: 9, but partition main has 2"),
        ({"minutes": 200}, 2, "slurm.minutes: 200, but the limit of partition main is 60"),
        ({"account": "other"}, 2, "slurm.account: other: not one of yours; choose one of lab1"),
    ],
)
def test_mistakes_are_found_where_slurm_itself_accepts_them(changes: dict, nodes: int, named: str) -> None:
    values = config.load("slurm").model_dump() | {"nodes": nodes, "slurm": {**PLAIN, **changes}}
    provider = Provider(State("none"), config.Cluster.model_validate(values))
    provider.jobs.login = Answers("lab1\n")  # type: ignore[assignment]
    with pytest.raises(UserError) as raised:
        provider.check_partition()
        provider.check_account()
    assert named in str(raised.value)


@pytest.mark.parametrize("content", ["{}", '{"nodes": [{}]}', "[1]", "{"])
def test_damaged_record_of_a_probe_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    state = State("none")
    monkeypatch.setattr(state, "dir", tmp_path)
    values = config.load("slurm").model_dump() | {"slurm": PLAIN}
    provider = Provider(state, config.Cluster.model_validate(values))
    assert provider.probed() == []
    (tmp_path / "probe.json").write_text(content)
    with pytest.raises(UserError, match=r"^probe\.json: [^\n]+$"):
        provider.status_notes()


def test_executor_of_jobs_is_chosen_where_nobody_can_log_in() -> None:
    contract = config.load("slurm").planned()
    assert contract.executor == "slurm"
    assert type(executors.make(contract, "slurm")) is executors.SlurmJobExecutor


def test_ranks_of_a_step_have_places_and_a_port_of_their_own() -> None:
    step = {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "1"}
    places = []
    for rank in range(4):
        given = step | {"SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank % 2}", "SLURM_NODEID": f"{rank // 2}"}
        found = slurm_rank.names(given, ["head", "w1"])
        places.append([found[f"HOROVOD_{name}"] for name in ("RANK", "LOCAL_RANK", "CROSS_RANK", "HOSTNAME")])
        assert (found["HOROVOD_SIZE"], found["HOROVOD_LOCAL_SIZE"], found["HOROVOD_CROSS_SIZE"]) == ("4", "2", "2")
        assert found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "head"
    assert places == [["0", "0", "0", "head"], ["1", "1", "0", "head"], ["2", "0", "1", "w1"], ["3", "1", "1", "w1"]]
    ports = {
        slurm_rank.port({"SLURM_JOB_ID": f"{job}", "SLURM_STEP_ID": f"{s}"}) for job in range(50) for s in range(7)
    }
    assert len(ports) == 350


def test_trial_records_its_job_and_the_repeated_events_of_a_second_start_are_ignored(tmp_path: Path) -> None:
    plan = load(tmp_path, nodes=[2], batches=[32, 64], device="emulated:p100", engines=["horovod-mpi"])
    folder = store.RunFolder(tmp_path / "run")
    folder.prepare({}, {})
    (folder.folder / "logs").mkdir(exist_ok=True)

    class Prints(executors.SshExecutor):
        def argv(self, launch: Launch) -> list[str]:
            return ["cat", str(tmp_path / "output")]

        def foreign(self, launch: Launch, senders: bool = False) -> list[str]:
            return []

        def offline(self, names: list[str]) -> list[str]:
            return []

    sweep = runner.Sweep(plan, folder, Prints(CLUSTER), {}, None, check=False)
    (group,) = sweep.groups
    sweep.progress = Progress(unfold.estimate(plan, [group]), set(), CoreProgress())
    done = {point.id: replace(report(["head", "w1"])[1], id=point.id) for point in group.points}
    first, second = done.values()
    events = [Allocation("7", "RUNNING"), Started(2), first, Allocation("7", "PREEMPTED")]
    events += [Allocation("8", "PENDING", "Resources"), Allocation("8", "RUNNING"), Started(2), first, second]
    lines = [protocol.MARK + json.dumps({"event": type(one).__name__, **protocol.asdict(one)}) for one in events]
    (tmp_path / "output").write_text("\n".join(lines) + "\n")
    Attempt(sweep, group, sweep.launch(group, SpecFile("x", "y"), runner.spec.Scaling()), "logs/a.log", "now").run()
    assert [(trial.id, trial.job) for trial in folder.trials()] == [(first.id, "7"), (second.id, "8")]


def test_login_host_that_is_silent_for_a_while_ends_nothing(slurm: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = slurm.jobs()
    answer, silent = jobs.login.run, [True, True]

    def run(words: list[str], content: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        if "squeue" in words[2] and silent:
            silent.pop()
            raise InfraError("cluster.slurm.login: cannot log in")
        return answer(words, content)

    monkeypatch.setattr(jobs.login, "run", run)
    told: list[Allocation] = []
    jobs.tell = told.append
    slurm.run("echo", "arrived", jobs=jobs)
    assert slurm.lines == ["arrived"]
    assert not silent
    assert [one.state for one in told][:2] == ["UNKNOWN", "UNKNOWN"]
    assert not (slurm.fake / "cancelled").exists()
