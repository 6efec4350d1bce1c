"""Other work on the nodes is named when a trial fails its proof, and our own never is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_sweep import CLUSTER, JOB, load, report

from bench.results import store
from bench.sweep import executors, foreign, runner
from bench.sweep.attempt import Attempt
from cluster.core.config import layout

USER = layout()["user"]
WORKER = "/opt/horovod/bin/python /opt/bench-worker/1 trials --spec /opt/bench-worker/specs/1.json --launch r1"
HEAD = f"""
    1     0 root      0.3 /lib/systemd/systemd
    2     0 root      9.0 [kworker/0:1-events]
   40     1 root      0.0 sshd: /usr/sbin/sshd -D [listener] 0 of 10-100 startups
  200    40 root      0.1 sshd: ops@notty
  201   200 root      1.0 sudo -u {USER} -H env -u SUDO_COMMAND python3 /opt/bench-worker/1 supervise r1 head,w1 mpirun
  202   201 {USER}    1.0 python3 /opt/bench-worker/1 supervise r1 head,w1 mpirun --launch r1
  203   202 {USER}   20.0 mpirun -np 2 -H head:1,w1:1 {WORKER}
  204   203 {USER}    1.0 /usr/bin/ssh -x w1 orted -mca ess "env"
  205   203 {USER}   90.0 {WORKER}
  300    40 root      0.1 sshd: alice@pts/0
  301   300 alice     0.0 -bash
  400     1 prometh   1.2 /usr/bin/prometheus-node-exporter
  500    40 ops      99.0 ps -eo pid=,ppid=,user:32=,pcpu=,args=
"""
NODE = f"""
    1     0 root      0.3 /lib/systemd/systemd
   40     1 root      0.0 sshd: {USER}@notty
   41    40 {USER}    2.0 orted -mca ess env
   42    41 {USER}   95.0 {WORKER}
   43    42 {USER}    0.5 sh -c nvidia-smi
"""
OTHER_JOB = f"""
  600     1 {USER}    0.1 /opt/horovod/bin/python /shared/train.py --epochs 90
  601     1 alice    55.0 iperf3 -c w1 -t 600
"""


@pytest.mark.parametrize("listing", [HEAD, NODE, HEAD + NODE.replace("    1     0", "    7     0"), "", "garbage\n1 2"])
def test_our_own_processes_and_the_systems_are_not_named(listing: str) -> None:
    assert foreign.on_node("head", listing, "r1") == ""


def test_other_jobs_of_any_account_are_named_the_busiest_first() -> None:
    found = foreign.on_node("w1", NODE + OTHER_JOB, "r1")
    train = f"/opt/horovod/bin/python /shared/train.py --epochs 90 (pid 600, {USER})"
    assert found == f"w1: iperf3 -c w1 -t 600 (pid 601, alice) and {train}"


def test_another_launch_of_the_same_worker_is_named() -> None:
    other = f"700 1 {USER} 50.0 {WORKER.replace('r1', 'r2')}\n"
    assert "--launch" in WORKER and "pid 700" in foreign.on_node("w1", NODE + other, "r1")


def socket(pid: int, peer: str, more: str = "lastsnd:4 lastrcv:4") -> str:
    return f'tcp ESTAB 0 0 10.1.0.10:7 {peer}:5201 users:(("x",pid={pid},fd=3)) cubic rto:204 {more}\n'


@pytest.mark.parametrize(
    ("sockets", "named"),
    [
        (socket(600, "10.1.0.11"), True),
        (socket(600, "[::ffff:10.1.0.11]"), True),
        # ss leaves a zero out.
        (socket(600, "10.1.0.11", "lastsnd:9000"), True),
        (socket(600, "10.1.0.11", "").replace("tcp", "udp"), True),
        (socket(600, "10.1.0.11", "lastsnd:9000 lastrcv:9000"), False),
        (socket(600, "10.1.0.10"), False),
        (socket(42, "10.1.0.11"), False),
        ("", False),
    ],
)
def test_of_those_who_may_have_sent_only_users_of_the_fabric_are_named(sockets: str, named: bool) -> None:
    found = foreign.on_node("w1", NODE + OTHER_JOB + sockets, "r1", to={"10.1.0.11"})
    assert found == (f"w1: /opt/horovod/bin/python /shared/train.py --epochs 90 (pid 600, {USER})" if named else "")


def finish(
    tmp_path: Path, share: float, listing: str, monkeypatch: pytest.MonkeyPatch, check: float | None = None
) -> tuple[Any, str, list[str]]:
    asked = []

    def answer(contract: Any, nodes: Any, command: str, **_: Any) -> dict[str, Any]:
        asked.append(command)
        return {name: SimpleNamespace(stdout=listing, returncode=0) for name in nodes}

    monkeypatch.setattr(foreign.ssh, "run_on_all", answer)
    sweep = runner.Sweep(
        load(tmp_path, nodes=[2]),
        store.RunFolder(tmp_path),
        executors.SshExecutor(CLUSTER),
        {},
        None,
        check=check is not None,
    )
    (tmp_path / "steps").mkdir()
    printed: list[str] = []
    (group,) = sweep.groups
    (point,) = group.points
    sweep.progress = SimpleNamespace(finished=lambda _, label, text: printed.append(f"{label}: {text}"))
    launch = replace(JOB, hosts=("head", "w1"))
    _, event = report(["head", "w1"], share=share)
    attempt = Attempt(sweep, group, launch, "log", "2026-01-01T00:00:00+00:00")
    attempt.finish(replace(event, id=point.id))
    if check is not None:
        _, again = report(["head", "w1"], share=check)
        attempt.finish(replace(again, id=point.id, scale=2 * event.scale, check=True))
    return sweep.folder.trials()[0], printed[0], asked


def test_trial_that_another_job_disturbed_is_printed_as_failed_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, printed, _ = finish(tmp_path, 1.6, NODE + OTHER_JOB, monkeypatch)
    assert (trial.status, trial.error_node, trial.images_per_second) == ("failed", "head", None)
    assert "other work on the nodes: head: iperf3 -c w1 -t 600 (pid 601, alice)" in trial.error
    assert "FAILED: fabric0 sent" in printed and "iperf3 -c w1" in printed and "images/s" not in printed


def test_trial_that_passes_its_proof_asks_the_nodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, printed, asked = finish(tmp_path, 1.0, NODE + OTHER_JOB, monkeypatch)
    assert trial.status == "ok" and "images/s" in printed and asked == []


def to_other_node(pid: int) -> str:
    return socket(pid, CLUSTER.nodes["w1"].fabric_addresses[CLUSTER.active_fabric])


def test_traffic_that_looks_like_negotiation_fails_the_trial_if_another_job_uses_the_fabric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not halve at twice the scale factor, as negotiation does not: 1 + 0.2 and 0.5 + 0.2."""
    trial, printed, _ = finish(tmp_path, 1.2, NODE + OTHER_JOB + to_other_node(600), monkeypatch, check=0.7)
    assert (trial.status, trial.error_node, trial.images_per_second) == ("failed", "head", None)
    assert "its gradients need" in trial.error and "train.py" in trial.error and "iperf3" not in trial.error
    assert "FAILED" in printed and "images/s" not in printed


def test_negotiation_is_not_taken_for_another_job_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial, printed, asked = finish(tmp_path, 1.2, NODE + OTHER_JOB, monkeypatch, check=0.7)
    assert trial.status == "ok" and trial.images_per_second and "images/s" in printed and len(asked) == 1
