"""Engines that exchange weights, on four nodes: correctness, bytes, predictions, and what a dead rank leaves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "e2e"))

import environments  # noqa: E402
from environments import BIN, ROOT, podman, run  # noqa: E402

from bench.predict import calibrate  # noqa: E402
from bench.predict.step import step_ms  # noqa: E402
from bench.results.trial import Trial  # noqa: E402
from cluster.core import worker_files  # noqa: E402
from cluster.core.state import State  # noqa: E402
from cluster.terraform import read_output  # noqa: E402

ENV = "e2easync"
NODES = ["head", "w1", "w2", "w3"]
PROGRAM = "/tmp/weights_on_node.py"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", autouse=True)
def deployed():
    environments.remove(ENV)
    environments.make_env(ENV, 86, len(NODES))
    environments.cluster("deploy", env=ENV)
    yield
    environments.remove(ENV)


@pytest.fixture(scope="module")
def program() -> str:
    worker_files.install(read_output(State(ENV)), ["head"])
    run("podman", "cp", TESTS / "long/weights_on_node.py", f"{ENV}-head:{PROGRAM}")
    return worker_files.folder()


def local(program: str, case: str, ranks: int = 3, ok: bool = True) -> tuple[list, list[int], str]:
    """What each of so many processes on the head found, their exit codes, and all they printed."""
    words = ["exec", f"{ENV}-head", "sudo", "-u", "horovod", "-H", "/opt/horovod/bin/python", PROGRAM, program, case]
    done = run("podman", *words, str(ranks), ok=ok, timeout=300)
    found = done.stdout.partition("@found ")[2]
    codes = json.loads(done.stdout.partition("codes ")[2].splitlines()[0])
    return json.loads(found.splitlines()[0]) if found else [], codes, done.stdout + done.stderr


@pytest.mark.parametrize("engine", ["ps-async", "hogwild", "local-sgd:4"])
def test_one_rank_alone_trains_as_without_an_engine(program, engine):
    assert local(program, f"train:{engine}", 1)[0][0]["difference"] < 1e-6


def test_local_sgd_with_period_one_equals_a_single_process(program):
    for row in local(program, "train:local-sgd:1")[0]:
        assert row["difference"] < 1e-5


@pytest.mark.parametrize("engine", ["ps-async", "easgd:1", "easgd:3", "local-sgd:4", "hogwild"])
def test_every_engine_learns(program, engine):
    for row in local(program, f"train:{engine}")[0]:
        assert row["last"] < row["first"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_elastic_averaging_with_period_one_follows_its_recurrence(program, ranks):
    for row in local(program, "elastic:easgd", ranks)[0]:
        assert row["wrong"] == []
        assert row["total"] == pytest.approx(row["updates"])


@pytest.mark.parametrize("engine", ["ps-async", "easgd", "hogwild"])
def test_staleness_is_counted_right_in_a_constructed_order(program, engine):
    row = local(program, f"staleness:{engine}")[0][0]
    # Per block; the three tensors are on three servers. Hogwild counts whole updates, from the beginning of a step.
    expected = {"6": 1, "0": 6} if engine == "hogwild" else {"8": 3, "1": 18}
    assert row["second"] == expected
    assert row["first"] == ({"0": 3} if engine == "hogwild" else {"0": 3, "1": 3, "2": 3})
    if engine != "easgd":
        # No update was lost: ranks took turns.
        assert row["value"] == row["updates"] == 10


@pytest.mark.parametrize("engine", ["ps-async", "easgd:4", "local-sgd:4", "hogwild"])
def test_ranks_end_by_themselves_when_one_dies(program, engine):
    found, codes, text = local(program, f"dead:{engine}", ok=False)
    assert found == []
    assert codes[-1] == 9
    # 999: still running a minute later.
    assert codes[:-1] == [1, 1]
    assert sorted(line for line in text.splitlines() if "rror" in line) == [
        f"Error: rank {one} lost its connection to a rank that ended" for one in range(2)
    ]


def sweep(name: str, tmp_path: Path, **changes: object) -> list[dict]:
    """The trials of a plan on these nodes."""
    plan = tmp_path / f"{name}.yml"
    values = {"nodes": [2], "batches": [64], "fabrics": ["1g"], "seconds": 15, **changes}
    plan.write_text(yaml.safe_dump(values))
    run(BIN / "bench", "sweep", "--env", ENV, "--plan", plan, ok=False)
    return [json.loads(line) for line in (ROOT / f"results/{ENV}/{name}/trials.jsonl").read_text().splitlines()]


def test_every_engine_passes_its_proof_of_transport_on_device_cpu(tmp_path):
    engines = ["ps-async", "easgd", "local-sgd"]
    trials = sweep("cpu", tmp_path, engines=engines, device="cpu", models=["mobilenetv2"], batches=[2], nodes=[3])
    assert [(trial["status"], trial["error"]) for trial in trials] == [("ok", None)] * 3
    for trial in trials:
        assert trial["weights"]["period"] == (1 if trial["point"]["engine"] == "ps-async" else 4)
        assert (trial["weights"]["staleness"] is None) == (trial["point"]["engine"] == "local-sgd")


def test_hogwild_shares_the_weights_of_one_node(tmp_path):
    changes = {"engines": ["hogwild"], "nodes": [1], "gpus_per_node": 3, "models": ["mobilenetv2"]}
    trials = sweep("hogwild", tmp_path, **changes) + sweep("shared", tmp_path, **changes, device="cpu", batches=[2])
    assert [(trial["status"], trial["error"]) for trial in trials] == [("ok", None)] * 2
    assert all(trial["weights"]["staleness"]["updates"] > 0 for trial in trials)


SEVERAL_NODES = ("horovod-gloo", "horovod-mpi", "ddp", "ps", "ps-async", "easgd", "local-sgd")


@pytest.mark.parametrize(
    ("engine", "nodes", "ranks"), [*((engine, 3, 1) for engine in SEVERAL_NODES), ("hogwild", 1, 3)]
)
def test_a_killed_rank_fails_the_trial_in_one_line(tmp_path, engine, nodes, ranks):
    plan = tmp_path / f"killed-{engine}.yml"
    values = {"nodes": [nodes], "batches": [64], "fabrics": ["1g"], "engines": [engine], "gpus_per_node": ranks}
    plan.write_text(yaml.safe_dump(values))
    process = subprocess.Popen([BIN / "bench", "sweep", "--env", ENV, "--plan", plan], cwd=ROOT)
    folder = ROOT / f"results/{ENV}/{plan.stem}"
    deadline = time.monotonic() + 180
    while not any("WarmUp" in log.read_text() for log in folder.glob("logs/*.log")):
        assert time.monotonic() < deadline, "the sweep never began to measure"
        time.sleep(0.2)
    podman("exec", f"{ENV}-{NODES[nodes - 1]}", "sh", "-c", "kill -9 $(pgrep -f 'bench-worker/.* trials' | tail -n 1)")
    assert process.wait(timeout=120) == 1
    (trial,) = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    assert trial["status"] == "failed"
    assert trial["error"] and "\n" not in trial["error"]


def test_predictions_of_every_point_are_within_15_percent(tmp_path):
    """1 and 10 Gbit/s, 1 to 4 nodes, on the scale model and without any calibration."""
    engines = ["horovod", "ps", "ps-async", "easgd"]
    changes = {"engines": engines, "fabrics": ["1g", "10g"], "nodes": [4, 3, 2, 1], "seconds": 8}
    trials = [Trial.model_validate(trial) for trial in sweep("predicted", tmp_path, **changes)]
    assert len(trials) == 32
    assert [trial.error for trial in trials if trial.error] == []
    misses = {}
    for trial in trials:
        setup = calibrate._setup(calibrate._series(trial), trial.point.gpus, trial.emulation.compute_ms)
        point = trial.point
        misses[point.engine, point.fabric, point.nodes] = step_ms(setup) / trial.step_ms.median - 1
    print(json.dumps({" ".join(map(str, where)): round(miss, 3) for where, miss in misses.items()}))
    assert {where: miss for where, miss in misses.items() if abs(miss) > 0.15} == {}


def test_converge_answers_its_questions_in_six_minutes():
    result = json.loads(run(BIN / "bench", "converge", "--env", ENV, "--json", timeout=800).stdout)
    print(json.dumps(result["answers"], indent=1), result["took_s"])
    assert result["took_s"] < 360
    assert result["kind"] == "emulated"
    assert all(len(row["runs"]) == 3 for row in result["curves"])
    assert all(run_["proved"] for row in result["curves"] for run_ in row["runs"])
    answers = result["answers"]
    assert len(answers["fastest way to the target"]) == 2
    assert len(answers["does any method beat the first engine in time to the target?"]) == 2
    assert answers["how many more samples do large batches need?"]
    averaged = [said for said in answers["same seed, same result"] if said.startswith("local SGD")]
    assert averaged and "3 of 3 seeds" in averaged[0]
    (folder,) = (ROOT / f"results/{ENV}/converge").iterdir()
    assert "EMULATED" in (folder / "report.html").read_text()
