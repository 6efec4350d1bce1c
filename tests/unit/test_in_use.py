"""scale and destroy say what runs and what will be lost, and ask."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from cluster import in_use
from cluster.core import contract, lock, ssh
from cluster.core.config import ROOT
from cluster.core.errors import UserError
from cluster.core.state import State

HOLD = """
import signal, sys, time
from pathlib import Path
from cluster.core import lock
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
sys.argv = [sys.argv[1], "--env", "x"]
with lock.environment(Path({path!r}), "x"):
    print("held", flush=True)
    time.sleep(300)
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def state(tmp_path: Path) -> State:
    made = State("x")
    made.dir, made.lock = tmp_path / "x", tmp_path / "x.lock"
    return made


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What ps prints on each node, and find on the head. A node that is not here does not answer."""
    answers = {"head": "", "w1": "", "share": "0 0"}

    def run(_contract, names, command, *_, **__):
        def one(name: str) -> subprocess.CompletedProcess[str]:
            if name not in answers:
                return subprocess.CompletedProcess([], 255, "", "timed out")
            return subprocess.CompletedProcess([], 0, answers["share" if "find" in command else name], "")

        return {name: one(name) for name in names}

    monkeypatch.setattr(ssh, "run_on_all", run)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return answers


def confirm(state: State, *, yes: bool = False, share: bool = True, backend: str = "glusterfs") -> None:
    nodes = {
        name: {
            "index": index,
            "role": role,
            "management_address": f"10.99.0.{10 + index}",
            "gpus": 0,
            "gpu_model": "none",
        }
        | {"fabric_addresses": {"1g": f"10.99.1.{10 + index}"}}
        for index, (name, role) in enumerate({"head": "head", "w1": "worker"}.items())
    }
    fabric = {"interface": "fabric0", "subnet": "10.99.1.0/24", "rate_gbps": 1, "transport": "tcp", "shaped": True}
    values = {
        **{"name": "x", "provider": "local", "active_fabric": "1g", "nodes": nodes, "fabrics": {"1g": fabric}},
        "ssh": {"user": "ops", "key": "/k", "known_hosts": "/h", "jump_host": None},
        "storage": {"backend": backend, "server": "head", "path": "/shared"},
    }
    in_use.confirm(state, contract.parse(values), ["head", "w1"], "destroy ENV=x", yes, share)


TRAINING = "/opt/horovod/bin/python train.py"


def test_idle_cluster_with_an_empty_share_is_not_asked_about(state, nodes, capsys, monkeypatch) -> None:
    nodes["head"] = "sshd: horovod@notty\n/lib/systemd/systemd --user\n(sd-pam)\n"
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    confirm(state)
    assert capsys.readouterr().err == ""


def test_files_in_the_share_are_counted_and_do_not_stop_a_script(state, nodes, capsys) -> None:
    nodes["share"] = "12 3500000"
    confirm(state)
    assert capsys.readouterr().err == "12 files (3.5 MB) in /shared will be lost\n"


@pytest.mark.parametrize("backend", ["none", "existing"])
def test_share_of_somebody_else_is_not_lost(state, nodes, capsys, backend: str) -> None:
    nodes["share"] = "12 3500000"
    confirm(state, backend=backend)
    assert capsys.readouterr().err == ""


def test_running_job_stops_a_script_unless_it_says_yes(state, nodes, capsys) -> None:
    nodes["w1"] = f"{TRAINING}\n"
    with pytest.raises(
        UserError, match=r"^ENV=x: node w1 runs .* train\.py; wait until it ends, or add --yes"
    ) as found:
        confirm(state)
    assert "\n" not in str(found.value)
    confirm(state, yes=True)
    assert f"node w1 runs {TRAINING}" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "goes_on"), [("y", True), ("yes", True), ("n", False), ("", False)])
def test_terminal_is_asked(state, nodes, monkeypatch, capsys, answer: str, goes_on: bool) -> None:
    nodes["share"] = "1 1000000"
    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    if goes_on:
        confirm(state)
    else:
        with pytest.raises(UserError, match="nothing was changed"):
            confirm(state)
    assert "destroy ENV=x? [y/N]" in capsys.readouterr().err


def test_head_that_does_not_answer_means_a_warning(state, nodes, capsys) -> None:
    del nodes["head"]
    confirm(state)
    assert "what is in /shared will be lost" in capsys.readouterr().err


def hold(state: State, command: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", HOLD.format(path=str(state.lock)), command]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_running_sweep_is_ended_only_with_yes(state, nodes) -> None:
    process = hold(state, "bench")
    try:
        with pytest.raises(UserError, match=rf"`bench --env x` \(pid {process.pid}, since .* is measuring on it"):
            confirm(state)
        assert process.poll() is None
        confirm(state, yes=True)
        assert lock.holder(state.lock) is None
        assert process.wait(timeout=10) == 143
    finally:
        process.kill()


def test_running_deploy_is_never_ended(state, nodes) -> None:
    process = hold(state, "cluster")
    try:
        with pytest.raises(UserError, match="is using it; wait until it ends"):
            confirm(state, yes=True)
        time.sleep(0.5)
        assert process.poll() is None
    finally:
        process.kill()


def test_only_files_that_users_made_are_counted(tmp_path: Path) -> None:
    shipped, share = tmp_path / "shipped", tmp_path / "share"
    for folder in ("notebooks", "examples", "results"):
        (share / folder).mkdir(parents=True)
    for name in ("notebooks/train.ipynb", "notebooks/plot.ipynb", "examples/images.py", "examples/a/b.py"):
        for place in (shipped, share):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text("as shipped")
    (share / "notebooks/plot.ipynb").write_text("edited")
    (share / "results/mine").write_text("data")
    (share / "results/empty").touch()
    # A sweep copies its trials there; the controller has them.
    (share / "results/sweeps/quick").mkdir(parents=True)
    (share / "results/sweeps/quick/trials.jsonl").write_text("{}")
    for path in share.rglob("*"):
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345)
    command = in_use.count_files(str(share), str(shipped))
    assert subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout == "2 10\n"


def test_shipped_files_are_where_the_role_installs_them() -> None:
    defaults = yaml.safe_load((ROOT / "roles/jupyterlab/defaults/main.yml").read_text())
    assert f"{defaults['jupyterlab_venv']}/shipped" == in_use.SHIPPED
