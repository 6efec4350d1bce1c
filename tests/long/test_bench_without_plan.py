"""`make bench` without PLAN: on a local cluster, on machines with two native fabrics on different cards, and where the
head has no GPU. Nodes of terraform/local that no role has configured serve as the machines.

The tests depend on each other and run in order; machines and environments are removed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

import environments
from environments import BIN, ROOT, podman, run

from cluster import terraform
from cluster.core import config
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers import registry

ROOM, ENV, BRIDGE, LOCAL = "nativeroom", "native", "nativebr", "nativelocal"
ENGINES = ["horovod-gloo", "horovod-mpi", "ddp", "ps"]
MANAGEMENT, FIRST, SECOND = "10.78.0", "10.78.1", "10.78.2"
# The card of the second fabric: names differ between machines. The first one's is fabric0.
CARDS = {"head": "ens9", "w1": "enp3s0", "w2": "eth10"}
pytestmark = pytest.mark.timeout(3600)


def inside(node: str, *words: str) -> str:
    return run("podman", "exec", f"{ROOM}-{node}", *words).stdout


def add_second_card(node: str, number: int) -> None:
    pid, card, outside = podman("inspect", "-f", "{{.State.Pid}}", f"{ROOM}-{node}"), CARDS[node], f"native{number}"
    run("ip", "link", "add", outside, "type", "veth", "peer", "name", card, "netns", pid)
    run("ip", "link", "set", outside, "master", BRIDGE, "up")
    inside(node, "ip", "address", "add", f"{SECOND}.{10 + number}/24", "dev", card)
    inside(node, "ip", "link", "set", card, "up")


def boot_machines() -> None:
    """A local deploy with Terraform but without Ansible, and a second fabric."""
    environments.make_env(ROOM, 78, len(CARDS))
    state = State(ROOM)
    state.prepare()
    loaded = config.load(ROOM)
    provider, progress = registry.provider(state, loaded), Progress(ROOM)
    clean = dict(os.environ)
    provider.ensure_image(progress)
    terraform.Root(state, loaded, provider).apply([], progress)
    # Terraform in this process changes os.environ; commands must start without these changes.
    os.environ.clear()
    os.environ.update(clean)
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "link", "set", BRIDGE, "up")
    for number, node in enumerate(CARDS):
        add_second_card(node, number)
        # They share cores: a waiting rank must let others run.
        quiet = (
            "install -d -o horovod ~horovod/.openmpi; echo mpi_yield_when_idle=1 > ~horovod/.openmpi/mca-params.conf"
        )
        inside(node, "sh", "-c", quiet)
    inside("head", "ping", "-c", "1", "-W", "5", f"{SECOND}.12")


def write_environment() -> None:
    shutil.copytree(ROOT / "inventories/baremetal", ROOT / "inventories" / ENV, symlinks=True)
    path = ROOT / f"inventories/{ENV}/group_vars/all/cluster.yml"
    content = yaml.safe_load(path.read_text())
    room = config.load(ROOM)
    hosts = [
        {
            **{"name": name, "address": f"{MANAGEMENT}.{10 + number}", "gpus": 0, "gpu_model": "none"},
            "fabric_addresses": {"one": f"{FIRST}.{10 + number}", "two": f"{SECOND}.{10 + number}"},
        }
        for number, name in enumerate(CARDS)
    ]
    networks = {"one": {"subnet": f"{FIRST}.0/24"}, "two": {"subnet": f"{SECOND}.0/24"}}
    content["cluster"] |= {
        **{"name": ENV, "nodes": len(CARDS), "admin_cidrs": [f"{MANAGEMENT}.1/32"], "active_fabric": "one"},
        "fabrics": {name: {"rate_gbps": 1, "transport": "tcp", "shaped": False} for name in ("one", "two")},
        # Containers cannot mount NFS; the features are those of the image.
        **{"storage": room.storage.model_dump(), "features": room.features.model_dump()},
        "baremetal": {"user": "ops", "key": str(State(ROOM).key), "networks": networks, "hosts": hosts},
    }
    path.write_text(yaml.safe_dump(content))


def remove() -> None:
    run("ip", "link", "delete", BRIDGE, ok=False)
    environments.remove(ENV, ROOM, LOCAL)


@pytest.fixture(scope="module", autouse=True)
def machines():
    remove()
    try:
        boot_machines()
        write_environment()
        subprocess.run([BIN / "cluster", "--env", ENV, "adopt"], cwd=ROOT, input="yes\n", text=True, check=True)
        yield
    finally:
        remove()


def sweep(*words: str | Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    return run(BIN / "bench", "sweep", "--env", ENV, *words, ok=ok, timeout=3000)


def write(path: Path, **values: object) -> Path:
    path.write_text(yaml.safe_dump({"nodes": [3], "batches": [32], "fabrics": "all", "seconds": 8, **values}))
    return path


def trials(name: str, env: str = ENV) -> list[dict]:
    """The trials of a run, which all succeeded."""
    rows = (ROOT / f"results/{env}/{name}/trials.jsonl").read_text().splitlines()
    found = [json.loads(row) for row in rows]
    assert [(trial["status"], trial["error"]) for trial in found] == [("ok", None)] * len(found)
    return found


def assert_only_its_card_sent(trial: dict) -> None:
    fabric, traffic = trial["point"]["fabric"], trial["traffic"]
    assert len(traffic["measured_bytes"]) == trial["point"]["nodes"]
    for node, sent in traffic["measured_bytes"].items():
        assert 0.85 * traffic["expected_bytes"] <= sent <= 1.3 * traffic["expected_bytes"], traffic
        others = traffic["other_bytes"][node]
        # The fabric's card is not among the others; that of the other fabric is, and is idle.
        assert (CARDS[node] in others, "fabric0" in others) == (fabric == "one", fabric == "two"), traffic
        assert max(others.values()) < 0.1 * traffic["expected_bytes"], traffic


def test_plan_that_cannot_fit_costs_nothing():
    done = sweep("--plan", "quick", ok=False)
    assert done.returncode == 2
    assert "unknown fabric '1g'" in done.stderr
    assert done.stderr.count("\n") == 1
    # Terraform has not run, and no host was changed.
    assert not State(ENV).tfstate.exists()
    for node in CARDS:
        assert not inside(node, "find", "/etc/horovod-cluster", "-name", "fabrics.json")


def test_make_bench_deploys_and_sweeps_both_fabrics_in_one_run():
    done = run("make", "bench", f"ENV={ENV}", timeout=3000)
    assert f"plan auto: fits ENV={ENV}" in done.stdout
    found = trials("auto")
    several = [trial for trial in found if trial["point"]["nodes"] > 1]
    assert {trial["point"]["fabric"] for trial in several} == {"one", "two"}
    assert max(trial["point"]["nodes"] for trial in several) == 3
    for trial in several:
        assert_only_its_card_sent(trial)


def test_every_engine_sends_over_the_card_of_the_fabric_that_is_not_active(tmp_path):
    sweep("--plan", write(tmp_path / "engines.yml", engines=ENGINES, fabrics=["two"]))
    found = trials("engines")
    assert [trial["point"]["engine"] for trial in found] == ENGINES
    for trial in found:
        assert_only_its_card_sent(trial)


def test_head_without_a_gpu_launches_and_runs_no_rank(tmp_path):
    """As if Terraform had found GPUs on the workers only. The ranks compute on CPUs, because there are none."""
    state = State(ENV).tfstate
    content = json.loads(state.read_text())
    for name, node in content["outputs"]["cluster"]["value"]["nodes"].items():
        node["gpus"] = 0 if name == "head" else 1
    state.write_text(json.dumps(content))
    values = {"nodes": [2], "batches": [1], "models": ["alexnet"], "device": "cpu", "engines": ENGINES}
    sweep("--plan", write(tmp_path / "cpu.yml", **values))
    for trial in (found := trials("cpu")):
        assert trial["traffic"]["measured_bytes"].keys() == {"w1", "w2"}
        assert_only_its_card_sent(trial)
    assert {(trial["point"]["engine"], trial["point"]["fabric"]) for trial in found} == {
        (engine, fabric) for engine in ENGINES for fabric in ("one", "two")
    }
    planned = json.loads(sweep("--dry-run", "--json").stdout)["trials"]
    assert {row["device"] for row in planned} == {"cuda"}
    assert max(row["nodes"] for row in planned) == 2


def test_make_bench_deploys_a_local_cluster_and_emulates_the_p100():
    environments.remove(ENV, ROOM)
    environments.make_env(LOCAL, 77, 2)
    done = run("make", "bench", f"ENV={LOCAL}", timeout=3000)
    assert f"plan quick: fits ENV={LOCAL}" in done.stdout
    assert "deploying 4 nodes first" in done.stdout
    found = trials("quick", LOCAL)
    assert {(trial["point"]["fabric"], trial["point"]["nodes"]) for trial in found} == {
        (fabric, nodes) for fabric in ("1g", "10g") for nodes in (1, 2, 4)
    }
    assert {trial["point"]["device"] for trial in found} == {"emulated:p100"}
