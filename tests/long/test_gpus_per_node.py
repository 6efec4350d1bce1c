"""Several ranks per node: every engine sends the bytes that its proof of transport expects.

The sums are real, the bytes are those of the nodes' cards, and no time is measured, so a busy machine does not matter.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "e2e"))

import environments  # noqa: E402
from environments import run  # noqa: E402

from bench.catalogue import models  # noqa: E402
from bench.results.trial import Point  # noqa: E402
from bench.sweep import launch, transport  # noqa: E402
from bench.worker.protocol import RankReport, Step, TrialDone  # noqa: E402
from cluster.core import ssh, worker_files  # noqa: E402
from cluster.core.state import State  # noqa: E402
from cluster.terraform import read_output  # noqa: E402
from cluster.tuning import Tuning  # noqa: E402

ENV, SECOND = "manyranks", 87
NODES = ["head", "w1", "w2", "w3"]
ENGINES = ["horovod-gloo", "horovod-mpi", "ddp", "ps"]
PROGRAM = "/tmp/sums_on_node.py"
SCALE = 20.0
# Nodes accept from each other only what comes over a fabric.
OPEN_MANAGEMENT = ("nft", "insert", "rule", "inet", "horovod_cluster", "input", "iifname", "mgmt0", "accept")
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module", autouse=True)
def deployed():
    environments.remove(ENV)
    environments.make_env(ENV, SECOND, len(NODES))
    try:
        environments.cluster("deploy", env=ENV)
        prepare()
        yield
    finally:
        environments.remove(ENV)


def prepare() -> None:
    worker_files.install(read_output(State(ENV)), NODES)
    for node in NODES:
        run("podman", "cp", TESTS / "long/sums_on_node.py", f"{ENV}-{node}:{PROGRAM}")


def proof(
    engine: str, nodes: int, gpus: int, compression: str = "none", over: tuple[str, str] | None = None
) -> tuple[float, str | None]:
    """Bytes that the fabric's cards sent over those expected, and the error of the proof.

    `over` is the interface and subnet that the ranks use instead of the fabric's.
    """
    contract, chosen = read_output(State(ENV)), Tuning()
    fabric = contract.fabrics[contract.active_fabric]
    interface, subnet = over or (fabric.interface, fabric.subnet)
    values = {"fabric": "1g", "rate_gbps": 1.0, "batch": 64, "model": "resnet50", "device": "emulated:p100"}
    point = Point.model_validate(
        {**values, "nodes": nodes, "gpus_per_node": gpus, "engine": engine, "compression": compression}
    )
    sizes = [max(1, round(count / SCALE)) for count, _ in models.get("resnet50").gradients_in_backward_order()]
    words = [launch.PYTHON, PROGRAM, worker_files.folder(), engine, compression, ",".join(map(str, sizes))]
    job = launch.Launch(
        run=f"{int(time.time() * 1000):x}",
        engine=engine,
        hosts=tuple(NODES[:nodes]),
        slots=gpus,
        subnet=subnet,
        interface=interface,
        settings=chosen,
        words=tuple(words),
    )
    text = run(*ssh.as_training_account(contract, contract.head, launch.argv(job)), timeout=600).stdout
    rows = json.loads(text.partition("@sums ")[2].splitlines()[0])
    assert len(rows) == nodes * gpus
    # Single bits are exact here, because all elements are equal.
    assert all(right for *_, right in rows)
    reports = [RankReport(node, local, [Step(1, 1, 1, 0)], sent) for node, local, sent, _ in rows]
    done = TrialDone("x", SCALE, 1.0, False, reports, [], 0.0, 0.0, 0.0)
    how = transport.algorithm(point, chosen)
    traffic, error = transport.proof(point, done, None, fabric.interface, how)
    return sum(traffic.measured_bytes.values()) / nodes / traffic.expected_bytes, error


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_every_engine_sends_the_bytes_of_its_algorithm(engine, gpus):
    share, error = proof(engine, 2, gpus)
    assert error is None
    assert share == pytest.approx(1, abs=0.15)


def test_single_bits_are_sent_from_all_to_all():
    assert proof("horovod-gloo", 2, 4, "1bit")[1] is None


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_on_the_wrong_interface_fails_its_proof(engine):
    """The sums are right, over the management network."""
    for node in NODES:
        run("podman", "exec", f"{ENV}-{node}", *OPEN_MANAGEMENT)
    error = proof(engine, 2, 2, over=("mgmt0", f"10.{SECOND}.0.0/24"))[1]
    assert error is not None and error.startswith("traffic went over mgmt0 on "), error
    assert error.endswith("not over fabric0"), error
