"""Engines that split the network, on four nodes: gradients, bytes, predictions, and what a dead rank leaves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "e2e"))

import environments  # noqa: E402
from environments import BIN, ROOT, podman, run  # noqa: E402

from bench.plan import split_engines  # noqa: E402
from bench.predict import split  # noqa: E402
from bench.predict.inputs import DEFAULTS, Setup  # noqa: E402
from bench.results.trial import Trial  # noqa: E402
from cluster.core import worker_files  # noqa: E402
from cluster.core.state import State  # noqa: E402
from cluster.terraform import read_output  # noqa: E402

ENV = "e2esplit"
NODES = ["head", "w1", "w2", "w3"]
THREE_RANKS = (
    *("fsdp", "pipeline", "pipeline,gpipe", "tensor", "tensor,gpt2", "tensor,bert", "spatial", "spatial,residual"),
)
# Two pipelines of two stages: data x pipeline.
FOUR_RANKS = ("fsdp", "pipeline,stages=2", "pipeline,gpipe,stages=2", "tensor", "spatial")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", autouse=True)
def deployed() -> Iterator[None]:
    environments.remove(ENV)
    environments.make_env(ENV, 88, len(NODES))
    try:
        environments.cluster("deploy", env=ENV)
        yield
    finally:
        environments.remove(ENV)


@pytest.mark.parametrize("cases", [THREE_RANKS, FOUR_RANKS], ids=["three ranks", "four ranks"])
def test_gradients_and_weights_are_those_of_one_process(cases):
    """Height, width, channels and hidden units do not divide by three."""
    ranks = 3 if cases is THREE_RANKS else 4
    worker_files.install(read_output(State(ENV)), NODES)
    hosts = ",".join(f"{node}:1" for node in NODES[:ranks])
    variables = ("MASTER_ADDR=head", "MASTER_PORT=29501", "GLOO_SOCKET_IFNAME=fabric0", "OMP_NUM_THREADS=1")
    exported = [word for value in variables for word in ("-x", value)]
    command = ["sudo", "-u", "horovod", "-H", "mpirun", "-H", hosts, *exported, "/opt/horovod/bin/python"]
    words = [*command, worker_files.folder(), "verify_split", *cases]
    text = run("podman", "exec", f"{ENV}-head", *words, timeout=300).stdout
    found = [json.loads(line.partition("@bench ")[2]) for line in text.splitlines() if "@bench " in line]
    assert [row["case"] for row in found] == list(cases)
    for row in found:
        assert row["ranks"] == ranks
        assert row["largest_gradient"] > 0
        assert row["gradient_difference"] <= 2e-6 * max(1.0, row["largest_gradient"]), row
        assert row["weight_difference"] < 1e-5, row


def write_plan(name: str, tmp_path: Path, **changes: object) -> Path:
    plan = tmp_path / f"{name}.yml"
    values = {"nodes": [4], "batches": [32], "fabrics": ["1g"], "models": ["vgg16"], "seconds": 8, **changes}
    plan.write_text(yaml.safe_dump(values))
    return plan


def sweep(name: str, tmp_path: Path, **changes: object) -> list[Trial]:
    plan = write_plan(name, tmp_path, **changes)
    run(BIN / "bench", "sweep", "--env", ENV, "--plan", plan, ok=False)
    lines = (ROOT / f"results/{ENV}/{name}/trials.jsonl").read_text().splitlines()
    return [Trial.model_validate_json(line) for line in lines]


def test_every_engine_trains_on_cpus_and_passes_its_proof_of_transport(tmp_path):
    changes = {"device": "cpu", "models": ["alexnet"], "batches": [2], "nodes": [3], "seconds": 5}
    trials = sweep("cpu", tmp_path, engines=list(split_engines.ENGINES), **changes)
    assert [(trial.point.engine, trial.status, trial.error) for trial in trials] == [
        (engine, "ok", None) for engine in split_engines.ENGINES
    ]


def predicted_ms(trial: Trial) -> float:
    """As `bench plan placement` predicts."""
    point = trial.point
    setup = Setup(
        *(point.model, point.batch, trial.emulation.compute_ms, point.nodes, 1, point.rate_gbps),
        gpu="p100",
        compute_doubt=0.08,
    )
    methods = {"horovod-mpi": split.data, "horovod-gloo": split.data}
    method = methods.get(point.engine) or getattr(split, point.engine)
    return method(setup, DEFAULTS).step_ms


@pytest.mark.parametrize(("fabric", "model"), [("1g", "vgg16"), ("10g", "vgg16"), ("10g", "resnet50")])
def test_emulated_engines_send_their_bytes_in_the_predicted_time(tmp_path, fabric, model):
    engines = ["horovod", "fsdp", "pipeline", "spatial", *(["tensor"] if model == "vgg16" else [])]
    trials = sweep(f"{fabric}-{model}", tmp_path, engines=engines, fabrics=[fabric], models=[model])
    assert [trial.error for trial in trials if trial.error] == []
    assert len(trials) == len(engines)
    steps = {trial.point.engine: (predicted_ms(trial), trial.step_ms.median) for trial in trials}
    print(json.dumps({engine: [round(one) for one in pair] for engine, pair in steps.items()}))
    misses = {engine: expected / found - 1 for engine, (expected, found) in steps.items()}
    assert {engine: miss for engine, miss in misses.items() if abs(miss) > 0.15} == {}


def test_two_pipelines_of_two_stages_send_their_bytes(tmp_path):
    (trial,) = sweep("replicas", tmp_path, engines=["pipeline"], stages=2, schedule="gpipe", fabrics=["10g"])
    assert (trial.status, trial.error) == ("ok", None)


@pytest.mark.parametrize("engine", split_engines.ENGINES)
def test_a_killed_rank_fails_the_trial_in_one_line(tmp_path, engine):
    plan = write_plan(f"killed-{engine}", tmp_path, engines=[engine], nodes=[3], seconds=60)
    process = subprocess.Popen([BIN / "bench", "sweep", "--env", ENV, "--plan", plan], cwd=ROOT)
    folder = ROOT / f"results/{ENV}/{plan.stem}"
    deadline = time.monotonic() + 180
    while not any("WarmUp" in log.read_text() for log in folder.glob("logs/*.log")):
        assert time.monotonic() < deadline, "the sweep never began to measure"
        time.sleep(0.2)
    podman("exec", f"{ENV}-w2", "sh", "-c", "kill -9 $(pgrep -f 'bench-worker/.* trials' | tail -n 1)")
    assert process.wait(timeout=120) == 1
    (line,) = (folder / "trials.jsonl").read_text().splitlines()
    trial = Trial.model_validate_json(line)
    assert trial.status == "failed"
    assert trial.error and "\n" not in trial.error
