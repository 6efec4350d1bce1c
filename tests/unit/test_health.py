"""What a node reports about itself."""

from __future__ import annotations

import json
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

from bench.sweep import launch
from cluster import health
from cluster.core import ssh
from cluster.core.contract import Fabric
from cluster.health import Health, judge
from cluster.tuning import Tuning


def answer(mbit: float | None = 1000.0, code: int = 0, problems: str = "", error: str = "") -> CompletedProcess[str]:
    shown = json.dumps({"interface": "fabric0", "mbit": mbit}) if not code else ""
    return CompletedProcess([], code, f"{problems}{shown}", error)


def test_rate_that_a_killed_sweep_left_is_reported() -> None:
    """After kill -9 the fabric stayed at 125 Mbit/s, and doctor said ok."""
    found = judge(answer(125.0), 1000)
    assert not found.problem
    assert "125 Mbit/s instead of 1000" in found.throttled
    assert "no limit" in judge(answer(None), 1000).throttled


@pytest.mark.parametrize(("mbit", "wanted"), [(1000.0, 1000), (999.999, 1000), (125.0, None), (None, None)])
def test_right_rate_unshaped_fabric_and_running_command_are_fine(mbit: float | None, wanted: float | None) -> None:
    assert judge(answer(mbit), wanted) == Health()


def test_problems_are_named() -> None:
    assert judge(answer(problems="problem fabric-rate is not active\n"), 1000).problem == "fabric-rate is not active"
    assert "denied" in judge(answer(code=255, error="Permission denied (publickey).\n"), 1000).problem
    assert judge(answer(code=1), 1000).problem
    assert "\x1b" not in judge(answer(code=255, error="\x1b[2J\n"), 1000).problem


def test_every_unit_is_looked_at() -> None:
    assert {"cluster-firewall", "fabric-rate", "cluster-hosts", "ssh"} == set(health.UNITS)
    assert all(unit in health.LOOK for unit in health.UNITS)


@pytest.mark.parametrize("engine", ["horovod-gloo", "horovod-mpi"])
@pytest.mark.parametrize("count", [1, 3])
def test_proof_starts_ranks_as_a_sweep_does(monkeypatch: pytest.MonkeyPatch, engine: str, count: int) -> None:
    settings = Tuning(engine=engine)
    monkeypatch.setattr(health.tuning, "load", lambda env: {"1g": settings})
    names = ["head", "w1", "w2"][:count]
    fabric = Fabric(interface="fabric0", subnet="10.9.1.0/24", rate_gbps=1, transport="tcp", shaped=True)
    fabrics = {"active_fabric": "1g", "fabrics": {"1g": fabric}, "interface": lambda node: "fabric0"}
    fabrics |= {"subnet": lambda name: fabric.subnet}
    contract = SimpleNamespace(**fabrics, provider="local")
    spec = launch.SpecFile("/spec", "0")
    sweep = launch.argv(
        launch.Launch("x", engine, tuple(names), 1, fabric.subnet, fabric.interface, spec, settings=settings)
    )
    proof = health.launch("x", contract, names)
    program = launch.HOROVODRUN if engine == "horovod-gloo" and count > 1 else "mpirun"
    assert program in sweep
    assert program in proof
    assert launch.PYTHON in sweep
    assert launch.PYTHON in proof
    hosts = ",".join(f"{name}:1" for name in names)
    assert hosts in sweep
    assert hosts in proof


def test_commands_never_use_a_connection_that_is_open_already() -> None:
    """Ansible's connections outlive the key that opened them."""
    keys = SimpleNamespace(user="ops", key="/key", known_hosts="/known", jump_host=None, port=2222)
    words = ssh.argv(SimpleNamespace(login=keys, address=lambda name: "10.9.0.10"), "w1", "true")
    assert {"ControlPath=none", "Port=2222"} <= set(words)
