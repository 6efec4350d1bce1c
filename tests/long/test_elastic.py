"""An elastic run goes on when a rank or a worker is lost, hangs, leaves, returns or joins. It needs the head alone.

After each fault all ranks have the same weights in every step, and every epoch uses every image once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "e2e")]

import environments  # noqa: E402
from environments import BIN, ROOT, podman, run  # noqa: E402

from bench.elastic import trace  # noqa: E402
from bench.elastic.faults import FAULTS, Target, kill_rank, pause_node, resume_node, start_node, stop_node  # noqa: E402
from bench.elastic.live import Live, place_of_rank  # noqa: E402
from cluster.core.contract import Contract  # noqa: E402
from cluster.core.state import State  # noqa: E402
from cluster.terraform import read_output  # noqa: E402

ENV = "elastictest"
NODES = ["head", "w1", "w2"]
RUNS = ROOT / "results" / ENV / "runs"
OPTIONS = ("--model", "small", "--pixels", "32", "--workers", "0", "--batch", "8", "--warmup", "1", "--trace")
# 1800 of the 2000 synthetic images, 12 micro-batches of 8.
STEPS_PER_EPOCH = 19
LEFT = "pgrep -af '[i]magenet_elastic|[r]un_agent|[r]un_launch|[h]orovodrun'; ls -d /run/run-2* 2>/dev/null"
# On a machine that is busy with other work.
SECONDS = 240
# Of undisturbed steps, before and after a fault.
WINDOW = 3
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module", autouse=True)
def contract() -> Iterator[Contract]:
    environments.remove(ENV)
    environments.make_env(ENV, 87, len(NODES))
    environments.cluster("deploy", env=ENV)
    yield read_output(State(ENV))
    environments.remove(ENV)


class Trained:
    """An elastic run of the example in the background."""

    def __init__(self, contract: Contract, *more: str, epochs: int = 12) -> None:
        known = set(RUNS.glob("*"))
        argv = [str(BIN / "bench"), "run", "--env", ENV, "--folder", str(ROOT / "examples"), "--min-nodes", "1"]
        # The nodes share the cores of one machine.
        argv += ["--env", "OMP_NUM_THREADS=1", "--env", "PYTHONFAULTHANDLER=1"]
        script = ("python", "imagenet_elastic.py", *OPTIONS, "--epochs", str(epochs))
        self.output = (ROOT / "results" / f"{ENV}.log").open("w+")
        self.process = subprocess.Popen(
            [*argv, *more, "--", *script], cwd=ROOT, stdout=self.output, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + 60
        while not (made := set(RUNS.glob("*")) - known) or " on head" not in self.text():
            assert time.monotonic() < deadline and self.process.poll() is None, self.text()
            time.sleep(0.5)
        self.folder = made.pop()
        self.contract, self.live = contract, Live(contract, self.folder.name)

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def target(self, node: str) -> Target:
        return Target(self.contract, self.folder.name, node)

    def end(self) -> list[str]:
        """Wait for the end of the run; what is wrong with it."""
        code = self.process.wait(timeout=SECONDS * 2)
        assert code == 0, self.text()
        run(BIN / "bench", "runs", "fetch", self.folder.name, "--env", ENV)
        metrics = [json.loads(line) for line in (self.folder / "out/metrics.jsonl").read_text().splitlines()]
        assert metrics[-1]["held_out_top1"] > 5 * 0.1
        lines = [
            f"{path.name}:{line}"
            for path in (self.folder / "out").glob("trace-*.jsonl")
            for line in path.read_text(errors="replace").splitlines()
        ]
        rows = trace.parse("\n".join(lines))
        used = {image for row in rows for image in row.images}
        assert len(used) == 1800
        return trace.problems(rows, used, STEPS_PER_EPOCH)


@pytest.fixture
def trained(contract: Contract) -> Iterator[Trained]:
    made = Trained(contract)
    yield made
    made.process.terminate()
    made.process.wait(timeout=120)
    made.output.close()
    for node in NODES:
        state = podman("inspect", "--format={{.State.Status}}", f"{ENV}-{node}")
        repair = {"paused": resume_node, "exited": start_node}.get(state)
        if repair:
            repair(made.target(node))
    assert nothing_runs(), "processes of the run are left"


def nothing_runs() -> bool:
    deadline = time.monotonic() + 60
    while any(podman("exec", f"{ENV}-{node}", "sh", "-c", LEFT) for node in NODES):
        if time.monotonic() > deadline:
            return False
        time.sleep(1)
    return True


def put_rank_0_on_a_worker(trained: Trained, rows: list[trace.Row]) -> list[trace.Row]:
    """Horovod starts with any node as rank 0. A node that comes back gets the last rank."""
    if place_of_rank(rows, 0) != "head":
        return rows
    at = trained.live.now()
    kill_rank(trained.target("head"))
    return trained.live.wait_for_size(len(NODES), SECONDS, after=at, window=WINDOW)


@pytest.mark.parametrize("name", FAULTS)
def test_run_goes_on_after_a_fault_and_after_its_repair(trained: Trained, name: str) -> None:
    fault = FAULTS[name]
    rows = trained.live.wait_for_size(len(NODES), SECONDS, window=WINDOW)
    if fault.rank0:
        rows = put_rank_0_on_a_worker(trained, rows)
    first = place_of_rank(rows, 0)
    victim = first if fault.rank0 else next(node for node in NODES[1:] if node != first)
    at = trained.live.now()
    fault.inject(trained.target(victim))
    recovery = trained.live.wait(name, lambda rows: trace.recovery(rows, at, window=WINDOW), SECONDS)
    assert (recovery.nodes_before, recovery.nodes_after) == (len(NODES), len(NODES) - 1)
    # The default of --commit-steps.
    assert recovery.steps_lost <= 10
    at = trained.live.now()
    fault.repair(trained.target(victim))
    trained.live.wait_for_size(len(NODES), SECONDS, after=at, window=WINDOW)
    assert trained.end() == []


def test_second_fault_during_recovery_is_survived(trained: Trained) -> None:
    rows = trained.live.wait_for_size(len(NODES), SECONDS, window=WINDOW)
    at = trained.live.now()
    kill_rank(trained.target("w1"))
    time.sleep(2)
    stop_node(trained.target("w2"))
    trained.live.wait("a step", lambda rows: trace.recovery(rows, at, window=WINDOW), SECONDS)
    start_node(trained.target("w2"))
    trained.live.wait_for_size(len(NODES), SECONDS, after=at, window=WINDOW)
    assert len(rows) and trained.end() == []


def test_node_that_was_never_there_joins(contract: Contract) -> None:
    stop_node(Target(contract, "", "w2"))
    made = Trained(contract)
    try:
        made.live.wait_for_size(2, SECONDS, window=WINDOW)
        start_node(Target(contract, "", "w2"))
        made.live.wait_for_size(3, SECONDS, window=WINDOW)
        assert made.end() == []
    finally:
        made.process.terminate()
        made.process.wait(timeout=120)


def test_interrupt_of_an_elastic_run_ends_every_process(trained: Trained) -> None:
    trained.live.wait_for_size(len(NODES), SECONDS, window=WINDOW)
    pause_node(trained.target("w1"))
    trained.process.terminate()
    trained.process.wait(timeout=120)
    resume_node(trained.target("w1"))
    assert nothing_runs()


def test_loss_of_the_head_ends_the_run_in_one_line(trained: Trained) -> None:
    trained.live.wait_for_size(len(NODES), SECONDS, window=WINDOW)
    stop_node(trained.target("head"))
    assert trained.process.wait(timeout=SECONDS) == 3
    last = trained.text().splitlines()[-1]
    assert last.startswith("bench: ") and "node head is lost" in last, trained.text()
    start_node(trained.target("head"))
    environments.cluster("deploy", env=ENV)
