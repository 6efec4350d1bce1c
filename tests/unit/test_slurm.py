"""Launches and runs through Slurm's queue, with stand-ins for its commands.

UPDATE_GOLDEN=1 rewrites the golden files."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_run import make, nodes
from test_sweep import CLUSTER

from bench.run import request
from bench.sweep import executors, launch
from bench.sweep.launch import Launch, SpecFile
from bench.worker import protocol, slurm_launch
from bench.worker.protocol import Allocation
from cluster.core import config, worker_files
from cluster.core.config import ROOT
from cluster.core.errors import UserError

GOLDEN = Path(__file__).parent / "golden"
BASE = Launch("18c", "horovod-mpi", ("head", "w1"), 2, "10.77.1.0/24", "fabric0", SpecFile("/opt/spec.json", "abc"))
LAUNCHES = {
    "mpi": BASE,
    "gloo": replace(BASE, engine="horovod-gloo"),
    "torchrun": replace(BASE, engine="ddp", torchrun=True),
    "cuda": replace(BASE, cuda=True),
    "one-node": replace(BASE, engine="horovod-gloo", hosts=("w1",)),
}
SLURM = CLUSTER.model_copy(update={"executor": "slurm"})
# What each stand-in does; SAY and CODE come from the test.
STANDINS = {
    "salloc": """
echo "$@" >> $FOLDER/requests
n=$(wc -l < $FOLDER/requests)
[ -z "$PENDING" ] || { echo "salloc: Pending job allocation $n" >&2; sleep $PENDING; }
while [ "${1#--}" != "$1" ]; do shift; done
trap 'touch $FOLDER/given-back; kill $child; exit 1' TERM
echo "salloc: Granted job allocation $n" >&2
"$@" & child=$!
wait $child
code=$?
[ $n -gt "${LOST:-0}" ] || code=1
exit $code
""",
    "squeue": """
n=$(wc -l < $FOLDER/requests)
: ${REASON:=Resources}
echo >> $FOLDER/looks
if [ -n "$COMPLETING" ] && [ $(wc -l < $FOLDER/looks) -le "$COMPLETING" ]; then echo "COMPLETING|None|N/A"; exit; fi
if [ $n -le "${LOST:-0}" ]; then echo "$STATE|None|N/A"; else echo "PENDING|$REASON|2026-11-19T05:40:00"; fi
""",
    "scancel": 'echo "$@" >> $FOLDER/cancelled\n',
    "sinfo": "echo w1; echo w1\n",
}


def start(folder: Path, *command: str, **variables: str) -> subprocess.Popen[str]:
    for name, text in STANDINS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FOLDER": str(folder), **variables}
    words = [
        sys.executable,
        "-c",
        "from bench.worker import slurm_launch as s; s.POLL_SECONDS = 0.2; s.MOST_UNAVAILABLE = 1; s.main()",
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*words, "salloc", "--x", *command], env=env, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[list[protocol.Event], str]:
    """The events and the error output of a launch whose input stays open until it ends."""
    assert process.stdout
    assert process.stderr
    events = [event for line in process.stdout if (event := protocol.parse(line))]
    text = process.stderr.read()
    process.wait(20)
    assert process.stdin
    process.stdin.close()
    return events, text


@pytest.mark.parametrize("name", LAUNCHES)
def test_request_for_nodes_equals_the_golden_file(name: str) -> None:
    words = [word.replace(worker_files.digest(), "DIGEST") for word in launch.salloc(LAUNCHES[name])]
    text = "".join(f"{shlex.quote(word)}\n" for word in words)
    golden = GOLDEN / f"salloc-{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_executor_is_chosen_by_the_contract_and_nothing_else() -> None:
    assert type(executors.make(SLURM, "local")) is executors.SlurmExecutor
    assert type(executors.make(CLUSTER, "local")) is executors.SshExecutor
    words = " ".join(executors.make(SLURM, "local").argv(BASE))
    assert "slurm_launch salloc" in words
    assert "supervise" not in words


def test_queue_is_reported_until_the_nodes_are_granted(tmp_path: Path) -> None:
    events, _ = finish(start(tmp_path, "true", PENDING="1.5"))
    waiting = Allocation("1", "PENDING", "Resources", "2026-11-19T05:40:00")
    assert events.count(waiting) >= 2
    assert events[-1] == Allocation("1", "RUNNING")


def test_closed_input_ends_the_launcher_and_cancels_the_job(tmp_path: Path) -> None:
    process = start(tmp_path, "sleep", "1000")
    assert process.stdout
    assert protocol.parse(process.stdout.readline()) == Allocation("1", "RUNNING")
    assert process.stdin
    process.stdin.close()
    assert process.wait(20) == 143
    assert (tmp_path / "given-back").exists()
    assert (tmp_path / "cancelled").read_text() == "1\n"


def test_killed_launch_gives_its_nodes_back(tmp_path: Path) -> None:
    process = start(tmp_path, "sleep", "1000")
    assert process.stdout
    process.stdout.readline()
    process.kill()
    deadline = time.monotonic() + 20
    while not (tmp_path / "given-back").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_preempted_job_is_requested_again(tmp_path: Path) -> None:
    events, text = finish(start(tmp_path, "true", LOST="2", STATE="PREEMPTED"))
    assert [(one.job, one.state) for one in events if isinstance(one, Allocation)] == [
        *(("1", "RUNNING"), ("1", "PREEMPTED"), ("2", "RUNNING"), ("2", "PREEMPTED"), ("3", "RUNNING")),
    ]
    assert "Error" not in text


def test_preemption_is_noticed_although_the_launcher_ended_first(tmp_path: Path) -> None:
    events, _ = finish(start(tmp_path, "true", LOST="1", STATE="PREEMPTED", COMPLETING="3"))
    found = [(one.job, one.state) for one in events if isinstance(one, Allocation)]
    assert found == [("1", "RUNNING"), ("1", "PREEMPTED"), ("2", "RUNNING")]


def test_requests_after_preemptions_are_bounded(tmp_path: Path) -> None:
    _, text = finish(start(tmp_path, "true", LOST="99", STATE="PREEMPTED"))
    assert len((tmp_path / "requests").read_text().splitlines()) == 1 + slurm_launch.MOST_PREEMPTIONS
    assert "Error: Slurm ended job 4 (PREEMPTED): more important jobs took its nodes 4 times" in text


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("NODE_FAIL", "a node failed (w1)"),
        ("TIMEOUT", "reached its time limit"),
        ("CANCELLED", "somebody cancelled it"),
    ],
)
def test_end_of_a_job_is_explained(tmp_path: Path, state: str, said: str) -> None:
    process = start(tmp_path, "true", LOST="1", STATE=state)
    _, text = finish(process)
    assert process.returncode == 1
    assert f"Error: Slurm ended job 1 ({state})" in text
    assert said in text


def test_request_for_a_node_that_is_down_is_given_up(tmp_path: Path) -> None:
    process = start(tmp_path, "true", PENDING="30", REASON="ReqNodeNotAvail, UnavailableNodes:w1")
    _, text = finish(process)
    assert process.returncode != 0
    assert "Error: Slurm does not give out w1: ReqNodeNotAvail, UnavailableNodes:w1" in text
    assert (tmp_path / "cancelled").read_text() == "1\n"


def test_users_run_takes_its_nodes_from_the_queue(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    cluster = nodes(2).model_copy(update={"executor": "slurm"})
    made = make(tmp_path, cluster, "--", "python", "train.py")
    (group,) = request.record(made, cluster, {})["groups"]
    assert group["argv"][:2] == ["salloc", f"--job-name=bench-{made.id}"]
    assert "--nodelist=head,w1" in group["argv"]


def test_elastic_run_is_refused_on_slurm(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    cluster = nodes(3).model_copy(update={"executor": "slurm"})
    with pytest.raises(UserError, match="--min-nodes: a Slurm job cannot change its nodes"):
        make(tmp_path, cluster, "--min-nodes", "2", "--", "python", "train.py")


def test_feature_decides_the_executor_and_gpulab_refuses_it() -> None:
    cluster = config.load("local")
    assert cluster.planned().executor == "ssh"
    with_slurm = config.Cluster.model_validate(cluster.model_dump() | {"features": {"slurm": True}})
    assert with_slurm.planned().executor == "slurm"
    gpulab = config.load("gpulab").model_dump() | {"features": {"slurm": True}}
    with pytest.raises(ValueError, match=r"features\.slurm: gpulab has its own queue"):
        config.Cluster.model_validate(gpulab)
