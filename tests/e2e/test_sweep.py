"""What a sweep measures on a local cluster, and what it leaves when it is stopped or loses a node.

The tests depend on each other and run in order; the cluster is always removed at the end.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import environments
import pytest
import silence
import yaml
from environments import BIN, ROOT, podman, run

ENV = "e2esweep"
pytestmark = pytest.mark.timeout(1500)
cluster = functools.partial(environments.cluster, env=ENV)


@pytest.fixture(scope="module", autouse=True)
def deployed():
    environments.remove(ENV)
    environments.make_env(ENV, 83, 3)
    try:
        shown = silence.record([BIN / "cluster", "--env", ENV, "deploy"], terminal=False, cwd=ROOT)
        assert shown.returncode == 0, shown.text
        assert silence.problems(shown) == []
        yield
    finally:
        environments.remove(ENV)


def write_plan(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "steps.yml"
    values = {"nodes": [1, 3], "batches": [32], "fabrics": ["1g"], "engines": ["ddp"], "seconds": 15, **changes}
    path.write_text(yaml.safe_dump(values))
    return path


def trials() -> list[dict]:
    return [json.loads(line) for line in (ROOT / f"results/{ENV}/steps/trials.jsonl").read_text().splitlines()]


def validation() -> dict:
    return json.loads((ROOT / f".state/{ENV}/validation.json").read_text())


def test_measured_steps_agree_with_the_network_rate(tmp_path):
    command = [BIN / "bench", "sweep", "--env", ENV, "--plan", write_plan(tmp_path)]
    shown = silence.record(command, terminal=False, cwd=ROOT)
    assert shown.returncode == 0, shown.text
    assert silence.problems(shown) == []
    one, three = trials()
    assert one["kind"] == three["kind"] == "emulated"
    assert one["step_ms"]["median"] == pytest.approx(one["emulation"]["compute_ms"], rel=0.1)
    # A link that the machine was too busy to measure has its rate all the same; 0.956 of it is payload.
    goodput = min(0.956 if "warning" in row else row["gbps"] for row in validation()["ring"])
    ring_ms = 2 * 2 / 3 * 102228128 * 8 / (goodput * 1e9) * 1e3
    # A network-bound step takes the time of the ring plus the forward pass, which cannot overlap.
    floor = ring_ms + one["emulation"]["compute_ms"] / 3
    assert 0.95 * ring_ms <= three["step_ms"]["median"] <= 1.15 * floor
    assert three["images_per_second"]["median"] < 3 * one["images_per_second"]["median"]


def test_second_sweep_skips_existing_trials(tmp_path):
    before = trials()
    text = run(BIN / "bench", "sweep", "--env", ENV, "--plan", write_plan(tmp_path)).stdout
    assert "2 of 2 trials are already measured" in text
    assert trials() == before


def test_slower_run_gives_the_same_step(tmp_path):
    """At half speed all times are divided by two. On three nodes, where waking ranks is cheap, the step is the same."""
    plan = write_plan(tmp_path, nodes=[3], slowdown=2).rename(tmp_path / "slower.yml")
    run(BIN / "bench", "sweep", "--env", ENV, "--plan", plan, "--no-check")
    (slower,) = [json.loads(line) for line in (ROOT / f"results/{ENV}/slower/trials.jsonl").read_text().splitlines()]
    usual = trials()[1]
    assert slower["emulation"]["slowdown"] == 2
    assert slower["step_ms"]["median"] == pytest.approx(usual["step_ms"]["median"], rel=0.1)
    assert slower["breakdown_ms"]["compute"] == pytest.approx(usual["breakdown_ms"]["compute"], rel=0.1)


def test_torchrun_starts_the_same_worker(tmp_path):
    plan = write_plan(tmp_path, nodes=[2], launcher="torchrun", seconds=6).rename(tmp_path / "torchrun.yml")
    run(BIN / "bench", "sweep", "--env", ENV, "--plan", plan, "--no-check")
    (trial,) = [json.loads(line) for line in (ROOT / f"results/{ENV}/torchrun/trials.jsonl").read_text().splitlines()]
    assert trial["status"] == "ok", trial["error"]
    assert trial["point"]["nodes"] == 2
    assert trial["images_per_second"]["median"] < 2 * trials()[0]["images_per_second"]["median"]


@pytest.mark.parametrize(
    ("engine", "compression", "layout"),
    [
        ("horovod-mpi", "none", "contiguous"),
        ("horovod-mpi", "none", "channels_last"),
        ("ddp", "none", "contiguous"),
        ("ddp-module", "none", "contiguous"),
        ("ddp-module", "none", "channels_last"),
        ("ps", "none", "contiguous"),
        ("horovod-mpi", "1bit", "contiguous"),
    ],
)
def test_training_on_many_ranks_equals_one(engine, compression, layout):
    """N ranks with batch b get the weights of one rank with batch N x b; with 1-bit compression nearly the same."""
    worker = podman("exec", f"{ENV}-head", "sh", "-c", "ls -td /opt/bench-worker/*/bench | head -n 1")
    hosts = [
        "-H",
        "head:1,w1:1,w2:1",
        "-x",
        "MASTER_ADDR=head",
        "-x",
        "MASTER_PORT=29501",
        "-x",
        "GLOO_SOCKET_IFNAME=fabric0",
    ]
    command = [
        "sudo",
        "-u",
        "horovod",
        "-H",
        "mpirun",
        *hosts,
        "/opt/horovod/bin/python",
        str(Path(worker.strip()).parent),
        "verify",
        engine,
        compression,
        layout,
    ]
    text = run("podman", "exec", f"{ENV}-head", *command, timeout=120).stdout
    result = json.loads(text.partition("@bench ")[2].splitlines()[0])
    assert result["ranks"] == 3
    assert result["identical"]
    assert result["largest_difference"] < (1e-5 if compression == "none" else 0.1)
    assert result["last_loss"] < result["first_loss"]


def running_ranks() -> str:
    return "".join(
        podman("exec", f"{ENV}-{node}", "pgrep", "-f", "bench-worker/.* trials") for node in ("head", "w1", "w2")
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_sweep_leaves_no_rank(tmp_path, number):
    plan = write_plan(tmp_path, nodes=[3], batches=[64])
    process = subprocess.Popen(
        [BIN / "bench", "sweep", "--env", ENV, "--plan", plan, "--run", f"stopped-{number}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        # Background jobs of a shell ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 180
    while not running_ranks() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert running_ranks(), "the sweep never started a rank"
    process.send_signal(number)
    process.wait(timeout=120)
    deadline = time.monotonic() + 60
    while running_ranks() and time.monotonic() < deadline:
        time.sleep(1)
    assert running_ranks() == ""


def test_node_lost_during_a_trial_is_named_and_a_rerun_completes(tmp_path):
    plan = write_plan(tmp_path, nodes=[3, 2], batches=[96])
    command = [BIN / "bench", "sweep", "--env", ENV, "--plan", plan, "--run", "lost"]
    file = ROOT / f"results/{ENV}/lost/trials.jsonl"

    def found() -> dict[int, dict]:
        lines = file.read_text().splitlines() if file.exists() else []
        return {trial["point"]["nodes"]: trial for trial in map(json.loads, lines)}

    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not any("WarmUp" in log.read_text() for log in file.parent.glob("logs/*.log")):
        assert time.monotonic() < deadline, "the sweep never began to measure"
        time.sleep(0.5)
    podman("stop", "-t", "0", f"{ENV}-w2")
    deadline = time.monotonic() + 60
    while 3 not in found():
        assert time.monotonic() < deadline, "not recorded within a minute"
        time.sleep(0.5)
    assert found()[3]["status"] == "failed"
    assert found()[3]["error_node"] == "w2"
    assert process.wait(timeout=180) == 1
    assert found()[2]["status"] == "ok"
    # The node is still stopped: nothing is started on it.
    done = run(*command, ok=False)
    assert done.returncode == 1
    assert "node w2 is offline" in done.stdout
    cluster("deploy")
    run(*command)
    assert found()[3]["status"] == "ok"


def test_report_marks_results_as_emulated():
    done = run(BIN / "bench", "report", ROOT / f"results/{ENV}/steps")
    page = (ROOT / f"results/{ENV}/steps/report.html").read_text()
    assert "emulated" in page.lower()
    assert done.returncode == 0


@contextmanager
def busy_machine() -> Iterator[None]:
    """One busy loop per core."""
    command = ["timeout", "600", "sh", "-c", "while :; do :; done"]
    loops = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.terminate()
        for loop in loops:
            loop.wait()


@contextmanager
def throttled(node: str, rate: str) -> Iterator[None]:
    """Limit what a node receives on the fabric, from the host's side."""
    pid = podman("inspect", "-f", "{{.State.Pid}}", f"{ENV}-{node}")
    inside = json.loads(run("nsenter", "-t", pid, "-n", "ip", "-json", "link", "show", "fabric0").stdout)
    links = json.loads(run("ip", "-json", "link").stdout)
    device = next(link["ifname"] for link in links if link["ifindex"] == inside[0]["link_index"])
    run("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
    try:
        yield
    finally:
        run("tc", "qdisc", "del", "dev", device, "root")


def test_deploy_passes_beside_one_busy_loop_per_core():
    with busy_machine():
        cluster("deploy")
    result = validation()
    assert result["ok"]
    for row in result["ring"]:
        assert row.get("warning") in [None, *result["warnings"]]
        assert "warning" in row or row["wire_gbps"] == pytest.approx(result["rate_gbps"], rel=0.1)


@pytest.mark.parametrize("busy", [False, True], ids=["quiet", "busy"])
def test_link_throttled_on_the_host_fails_the_deploy(busy):
    with ExitStack() as stack:
        stack.enter_context(throttled("w1", "500mbit"))
        if busy:
            stack.enter_context(busy_machine())
        done = cluster("deploy", ok=False)
    assert done.returncode == 3
    assert "head to w1: " in done.stderr
    assert "so the machine's load is not the reason" in done.stderr
    assert not validation()["ok"]
    cluster("deploy")
