"""A new user: a first model, an own project on four nodes, the same from JupyterLab in a browser, and after a disaster.

The tests share one cluster, which is always removed at the end. They follow docs/train.md. Shorter ones are in
tests/e2e/test_run.py.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "e2e")]

from environments import BIN, ROOT, cluster, leftovers, make_env, podman, remove, run  # noqa: E402

from bench.cli import build_parser  # noqa: E402
from bench.run import command, request  # noqa: E402
from cluster.core.state import State  # noqa: E402
from cluster.terraform import read_output  # noqa: E402
from tests.browser import conftest as chromium  # noqa: E402

ENV = "journey"
NODES = ("head", "w1", "w2", "w3")
RUNS = ROOT / "results" / ENV / "runs"
EXAMPLE = "examples/imagenet_horovod.py"
SMALL = "--model small --pixels 32 --workers 1 --batch 16 --micro-batches 4 --lr 0.5 --warmup 1"
# The project of the user: a linear model of a tiny data set, whose slope is 3.
SCRIPT = """
import json, os
import horovod.torch as hvd
import humanize, numpy, torch

hvd.init()
x, y = numpy.load(os.environ["RUN_DATA"] + "/tiny/line.npy")
x, y = (torch.tensor(part[hvd.rank() :: hvd.size()]) for part in (x, y))
slope = torch.zeros(1, requires_grad=True)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([slope], 0.2), [("slope", slope)])
for _ in range(60):
    optimizer.zero_grad()
    ((slope * x - y) ** 2).mean().backward()
    optimizer.step()
if hvd.rank() == 0:
    print("files", *sorted(os.listdir()), humanize.intcomma(12345), flush=True)
    torch.save(slope, os.environ["RUN_OUTPUT"] + "/model.pt")
    found = {"slope": slope.item(), "size": hvd.size(), "rank": int(os.environ["RANK"])}
    open(os.environ["RUN_OUTPUT"] + "/result.json", "w").write(json.dumps(found))
"""
# The controller has no torch.
DIFFERENCE = """
import sys, torch
models = [torch.load(path, weights_only=True)["model"] for path in sys.argv[1:]]
one, *others = [torch.cat([value.double().flatten() for value in model.values()]) for model in models]
print(max(((one - other).norm() / one.norm()).item() for other in others))
"""
STEP = "import sys, torch; print(torch.load(sys.argv[1], weights_only=True)['step'])"
# The first attempt fails, the second does not.
AGAIN = """
import os, time
from pathlib import Path
tries = Path(os.environ["RUN_OUTPUT"]) / ("tries" + os.environ["RANK"])
tries.write_text((tries.read_text() if tries.exists() else "") + "x")
print("try", len(tries.read_text()), flush=True)
time.sleep(3)
assert len(tries.read_text()) == 2
"""
RANKS = """
import os, sys
if sys.argv[1] == "ddp":
    import torch.distributed as engine
    engine.init_process_group("gloo")
else:
    import horovod.torch as engine
    engine.init()
engine.barrier()
print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")), os.uname().nodename)
"""
pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module", autouse=True)
def environment():
    remove(ENV)
    make_env(ENV, 80, len(NODES))
    cluster("deploy", env=ENV)
    yield
    remove(ENV)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("project")
    for name, text in {
        "train.py": SCRIPT,
        "requirements.txt": "humanize\n",
        ".runignore": "*.txt\n!requirements.txt\n",
        "private.txt": "not for the nodes\n",
    }.items():
        (made / name).write_text(text)
    (made / "tiny").mkdir()
    x = numpy.linspace(-1, 1, 64, dtype=numpy.float32)
    numpy.save(made / "tiny/line.npy", numpy.stack([x, 3 * x]))
    return made


def make(target: str, **values: str) -> subprocess.CompletedProcess[str]:
    return run("make", target, *(f"{name}={value}" for name, value in values.items()), f"ENV={ENV}")


def train(nodes: int, *more: str) -> str:
    """Train the example from one command. Returns the checkpoint's path on the nodes."""
    words = ["--env", ENV, "--nodes", str(nodes), "--folder", "examples"]
    run(BIN / "bench", "run", *words, "--", "python", Path(EXAMPLE).name, *SMALL.split(), *more)
    return checkpoint(last())


def last() -> str:
    return sorted(path.name for path in RUNS.iterdir())[-1]


def checkpoint(name: str) -> str:
    return f"/shared/runs/{name}/out/checkpoint.pt"


def python(*words: str) -> str:
    return podman("exec", f"{ENV}-head", "/opt/horovod/bin/python", "-c", *words)


def test_first_model_is_trained_within_a_minute_by_one_command():
    begin = time.monotonic()
    done = make("run", SCRIPT=EXAMPLE, ARGS=f"{SMALL} --epochs 3")
    seconds = time.monotonic() - begin
    # Ten classes.
    assert float(re.findall(r"held_out_top1 ([\d.]+)", done.stdout)[-1]) > 5 / 10, done.stdout
    assert seconds < 60


def test_own_project_goes_from_a_folder_to_a_fetched_model(project, tmp_path):
    make("put", SRC=str(project / "tiny"))
    done = make("run", SCRIPT=f"{project}/train.py", REQUIREMENTS=f"{project}/requirements.txt", NODES="4")
    assert "files .runignore requirements.txt tiny train.py 12,345" in done.stdout
    run(BIN / "bench", "runs", "fetch", "latest", "--env", ENV)
    folder = RUNS / last()
    found = json.loads((folder / "out/result.json").read_text())
    assert found["size"] == 4 and found["slope"] == pytest.approx(3, abs=1e-3)
    assert sorted(path.name for path in folder.glob("logs/rank-*.log")) == [f"rank-{n}.log" for n in range(4)]
    make("get", SRC=f"runs/{last()}/out/model.pt", DST=str(tmp_path))
    assert (tmp_path / "model.pt").read_bytes() == (folder / "out/model.pt").read_bytes()


@pytest.mark.parametrize("engine", ["horovod", "ddp"])
def test_every_node_runs_as_many_ranks_as_it_is_given(tmp_path, engine):
    (tmp_path / "ranks.py").write_text(RANKS)
    words = ["--env", ENV, "--nodes", "2", "--gpus-per-node", "2", "--engine", engine, "--all-ranks"]
    done = run(BIN / "bench", "run", *words, "--folder", tmp_path, "--", "python", "ranks.py", engine)
    found = sorted(line.split() for line in done.stdout.splitlines())
    assert [row[:5] for row in found] == [[f"[{n}]", f"{n}", "4", f"{n % 2}", "2"] for n in range(4)], done.stdout
    # torchrun numbers the nodes itself.
    assert [row[5] for row in found] in (["head"] * 2 + ["w1"] * 2, ["w1"] * 2 + ["head"] * 2)


def test_1_2_and_4_nodes_train_the_same_weights():
    made = [train(nodes, "--steps", "20") for nodes in (1, 2, 4)]
    assert float(python(DIFFERENCE, *made)) <= 1e-4


def test_example_resumes_after_kill_9_of_everything():
    """The ranks, the launcher, the agents and the command itself. The resumed run has other nodes."""
    known = {path.name for path in RUNS.iterdir()}
    words = ["--env", ENV, "--folder", "examples", "--", "python", Path(EXAMPLE).name, *SMALL.split()]
    argv = [str(BIN / "bench"), "run", *words, "--checkpoint-steps", "20"]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (new := {path.name for path in RUNS.iterdir()} - known) or not exists(checkpoint(min(new))):
        assert process.poll() is None and time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.2)
    for node in NODES:
        podman("exec", "--user", "horovod", f"{ENV}-{node}", "sh", "-c", "kill -9 -1")
    process.send_signal(signal.SIGKILL)
    process.wait()
    while not ended(known):
        assert time.monotonic() < deadline, "the head did not record the end"
        time.sleep(0.5)
    begun = int(python(STEP, checkpoint(last())))
    more = ("--steps", str(begun + 20))
    done = run(BIN / "bench", "run", "--resume", "latest", "--nodes", "2", *words, *more)
    assert f"resumes at step {begun}" in done.stdout
    assert float(python(DIFFERENCE, checkpoint(last()), train(4, *more))) <= 1e-3


def exists(path: str) -> bool:
    return podman("exec", f"{ENV}-head", "sh", "-c", f"test -e {path} && echo yes") == "yes"


def test_terminal_of_jupyterlab_in_a_browser_trains_the_same_project(project, tmp_path):
    make("put", SRC=f"{project}/", DST="notebooks/project")
    lab = json.loads(cluster("lab", "--json", "--show-token", env=ENV).stdout)
    known = set(podman("exec", f"{ENV}-head", "ls", "/shared/runs").split())
    driver = chromium.start(tmp_path, chromium.trusting(Path(lab["certificate"])))
    try:
        driver.get(f"{lab['url']}?reset&token={lab['token']}")
        wait = WebDriverWait(driver, 180)
        card = ".jp-LauncherCard[data-category='Other'][title*='terminal']"
        wait.until(lambda page: page.find_elements(By.CSS_SELECTOR, card))[0].click()
        box = wait.until(lambda page: page.find_elements(By.CSS_SELECTOR, ".jp-Terminal textarea"))[0]
        box.send_keys(
            "cd /shared/notebooks/project && pip install humanize && bench run -- python train.py", Keys.ENTER
        )
        deadline = time.monotonic() + 300
        while not (end := ended(known)):
            assert time.monotonic() < deadline, "the run did not end"
            time.sleep(1)
    finally:
        driver.quit()
    assert end["state"] == "ok", end
    found = json.loads(podman("exec", f"{ENV}-head", "cat", f"/shared/runs/{end['name']}/out/result.json"))
    assert found["size"] == 4 and found["slope"] == pytest.approx(3, abs=1e-3)
    listed = json.loads(run(BIN / "bench", "runs", "--env", ENV, "--json").stdout)
    assert [one["state"] for one in listed if one["id"] == end["name"]] == ["ok"]


@pytest.mark.parametrize("number", ["INT", "HUP"])
def test_run_that_is_ended_on_the_head_leaves_no_process(number):
    """The ranks have data loaders' workers and a child in a session of its own."""
    script = (
        "import subprocess, time, torch; "
        "loader = iter(torch.utils.data.DataLoader(torch.zeros(99, 2), num_workers=1)); next(loader); "
        "subprocess.Popen(['sleep', '8765'], start_new_session=True); time.sleep(600)"
    )
    known = set(podman("exec", f"{ENV}-head", "ls", "/shared/runs").split())
    start = ["podman", "exec", "--user", "horovod", f"{ENV}-head", "bash", "-lc"]
    command = f'cd /shared/notebooks && exec bench run -- python -c "{script}"'
    look = "pgrep -af '[s]leep 8765|[D]ataLoader'"
    process = subprocess.Popen([*start, command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 180
    while sum("sleep 8765" in podman("exec", f"{ENV}-{node}", "sh", "-c", look) for node in NODES) < len(NODES):
        assert process.poll() is None and time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.5)
    for other in (("run", "--folder", "examples", "--", "python", "images.py"), ("comm",)):
        refused = run(BIN / "bench", other[0], "--env", ENV, *other[1:], ok=False)
        assert refused.returncode == 2 and "somebody started a run there" in refused.stderr, refused.stderr
    podman("exec", f"{ENV}-head", "sh", "-c", f"pkill -{number} -f '[b]ench run'")
    process.wait(timeout=60)
    assert ended(known)["state"] == "cancelled"
    left = [podman("exec", f"{ENV}-{node}", "sh", "-c", f"{look}; pgrep -af '[h]orovodrun'") for node in NODES]
    assert not any(left), left


def ended(known: set[str]) -> dict[str, str] | None:
    for name in set(podman("exec", f"{ENV}-head", "ls", "/shared/runs").split()) - known:
        if text := podman("exec", f"{ENV}-head", "sh", "-c", f"cat /shared/runs/{name}/end.json 2>/dev/null"):
            return {**json.loads(text), "name": name}
    return None


def test_failed_script_is_started_again_and_followed_from_elsewhere(tmp_path):
    (tmp_path / "again.py").write_text(AGAIN)
    words = ["--env", ENV, "--nodes", "2", "--folder", tmp_path, "--detach", "--max-restarts", "1"]
    run(BIN / "bench", "run", *words, "--", "python", "again.py")
    followed = run(BIN / "bench", "runs", "logs", "latest", "-f", "--env", ENV).stdout
    assert followed.index("try 1") < followed.index("AssertionError") < followed.index("try 2"), followed
    listed = json.loads(run(BIN / "bench", "runs", "--env", ENV, "--json").stdout)
    assert listed[-1]["state"] == "ok"


def test_printed_command_works_when_it_is_typed_on_the_head(project):
    words = ["--env", ENV, "--env", "TOKEN=hunter2", "--nodes", "2", "--folder", project, "--print"]
    line = run(BIN / "bench", "run", *words, "--", "python", "-c", "import os; print(os.environ['TOKEN'])").stdout
    assert "TOKEN=***" in line and "hunter2" not in line
    done = podman("exec", "--user", "horovod", f"{ENV}-head", "bash", "-lc", f"cd /shared && {line}")
    assert done.count("***") == 2, done


def test_nodes_stop_themselves_after_a_run_that_failed_while_nobody_watches(tmp_path):
    """--then stop is for instances that cost money. Local nodes stop in the same way, and podman starts them again."""
    (tmp_path / "broken.py").write_text("x ==\n")
    state = State(ENV)
    contract = read_output(state)
    argv = ["run", "--env", ENV, "--folder", str(tmp_path), "--detach", "--", "python", "broken.py"]
    args = build_parser(argv).parse_args(argv)
    asked = replace(request.make(args, contract, {}), then="stop")
    before = {node: started(node) for node in NODES}
    assert command.carry_out(args, ENV, state, contract, asked) == 0
    deadline = time.monotonic() + 300
    while any(started(node) == before[node] for node in NODES):
        assert time.monotonic() < deadline, "the nodes did not stop"
        time.sleep(1)


def test_cluster_is_destroyed_after_a_failure_when_its_outputs_are_here(tmp_path):
    (tmp_path / "fails.py").write_text("import os; open(os.environ['RUN_OUTPUT'] + '/model', 'w').write('7'); assert 0")
    argv = [BIN / "bench", "run", "--env", ENV, "--folder", tmp_path, "--then", "destroy", "--", "python", "fails.py"]
    deadline = time.monotonic() + 120
    # The nodes come back from the test before.
    while (done := run(*argv, ok=False)).returncode == 3:
        assert "the cluster is kept" in done.stderr and time.monotonic() < deadline, done.stderr
        time.sleep(2)
    assert done.returncode == 1, done.stderr
    assert (RUNS / last() / "out/model").read_text() == "7"
    assert leftovers(ENV) == []


def started(node: str) -> str:
    return podman("inspect", "--format", "{{.State.StartedAt}} {{.State.Running}}", f"{ENV}-{node}")
