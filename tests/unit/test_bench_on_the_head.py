"""bench on the head: which launcher starts which ranks, and what it refuses. On nodes: tests/long/test_journey.py."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.run import nodes
from bench.worker import on_head, run_list
from cluster.core import files


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = on_head
    handlers = {number: signal.getsignal(number) for number in module.ENDS}
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hostfile").write_text("head slots=2\nw1 slots=2\nw2 slots=2\n")
    (tmp_path / "share/mine").mkdir(parents=True)
    monkeypatch.setattr(module, "SETTINGS", tmp_path / "etc")
    monkeypatch.setattr(module, "RUNTIME", tmp_path)
    # Local clusters of this machine may measure meanwhile.
    monkeypatch.setattr(module, "SUPERVISOR", f"{tmp_path}/worker supervise")
    monkeypatch.setattr(module, "cleared", [], raising=False)
    monkeypatch.setattr(module, "clear", lambda name, names: module.cleared.append(tuple(names)))
    monkeypatch.chdir(tmp_path / "share/mine")
    yield module
    # At the end of a run nothing may interrupt it any more, so it ignores them.
    for number, handler in handlers.items():
        signal.signal(number, handler)


def ask(engine: str = "horovod", nodes: int | None = None, *words: str) -> argparse.Namespace:
    return argparse.Namespace(engine=engine, nodes=nodes, words=list(words))


def test_launchers_start_all_slots_of_the_chosen_nodes(bench: ModuleType) -> None:
    chosen = bench.hosts(["head slots=2", "w1 slots=2", ""], None)
    assert bench.launcher("horovod", chosen) == ["horovodrun", "--gloo", "-np", "4", "-H", "head:2,w1:2"]
    line = " ".join(bench.launcher("ddp", chosen))
    assert line.startswith("mpirun -np 2 -H head,w1 ") and "torchrun --nnodes 2 --nproc-per-node 2 " in line
    assert "--standalone --nproc-per-node 2" in " ".join(bench.launcher("ddp", chosen[:1]))


@pytest.mark.parametrize(
    ("nodes", "words", "reason"),
    [(4, ("python", "x.py"), "--nodes 4: the cluster has 3"), (None, (), "COMMAND: missing")],
)
def test_what_cannot_work_is_one_line(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], nodes: int, words: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.run(tmp_path / "share", ask("horovod", nodes, *words))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(f"bench: {reason}") and said.count("\n") == 1


def test_a_folder_that_other_nodes_cannot_see_is_refused(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        bench.run(tmp_path / "share", ask("horovod", None, "python", "x.py"))
    assert "other nodes cannot see it" in capsys.readouterr().err


def test_a_run_has_a_folder_the_variables_and_a_record(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher is a stand-in that gives one rank its variables, as horovodrun does."""
    start = ["env", "HOROVOD_RANK=1", "HOROVOD_SIZE=3", "HOROVOD_LOCAL_RANK=0", "HOROVOD_LOCAL_SIZE=1"]
    monkeypatch.setattr(bench, "launcher", lambda *_: start)
    show = 'echo "$RANK $WORLD_SIZE $RUN_DATA"; echo 7 > "$RUN_OUTPUT/x"; exit 3'
    assert bench.run(tmp_path / "share", ask("horovod", None, "--", "sh", "-c", show)) == 1
    (folder,) = (tmp_path / "share/runs").iterdir()
    assert capfd.readouterr().out == (folder / "logs/rank-0.log").read_text() == f"1 3 {tmp_path}/share/datasets\n"
    assert (folder / "out/x").read_text() == "7\n"
    # The controller's `bench runs` reads the same record.
    (listed,) = runs_on(tmp_path / "share")
    # Processes of the run are ended on all of its nodes, whoever started them there.
    assert bench.cleared == [("head", "w1", "w2")]
    assert (listed["state"], listed["nodes"], listed["id"]) == ("failed", ["head", "w1", "w2"], folder.name)


def runs_on(share: Path) -> list[dict[str, Any]]:
    """What the controller's `bench runs` gets."""
    argv = ["python3", "-c", f"{Path(run_list.__file__).read_text()}\nmain()\n", str(share / "runs")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return files.answer(done.stdout, "node head", list[nodes.Listed])


def test_damaged_record_hides_no_other_run(bench: ModuleType, tmp_path: Path, capsys) -> None:
    whole = {"id": "2", "command": "c", "engine": "ddp", "nodes": ["w1"], "points": [], "groups": []}
    for name, text in {"1": '{"id": "1", "comm', "2": json.dumps(whole), "3": "[]", "4": '{"a": 1}'}.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text(text)
    (tmp_path / "runs/2/end.json").write_text('{"state": "o')
    states = {"1": "damaged", "2": "lost", "3": "damaged", "4": "damaged"}
    assert {one["id"]: one["state"] for one in runs_on(tmp_path)} == states
    bench.runs(tmp_path)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(states)


def test_one_run_at_a_time_uses_the_nodes(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostfile = tmp_path / "etc/hostfile"
    # The controller asks like this.
    ask = ["flock", "--nonblock", "--conflict-exit-code", "75", hostfile, "true"]
    with bench.take(hostfile):
        assert subprocess.run(ask, check=False).returncode == 75
        with pytest.raises(SystemExit):
            bench.take(hostfile)
    assert subprocess.run(ask, check=False).returncode == 0
    words = ["python3", "-c", "import time; time.sleep(60)", f"{tmp_path}/worker", "supervise"]
    with subprocess.Popen(words) as sweep:
        with pytest.raises(SystemExit):
            bench.take(hostfile)
        sweep.kill()
    # A run that the controller started.
    (tmp_path / "run-2026-a-launch").mkdir()
    with pytest.raises(SystemExit) as ended:
        bench.take(hostfile)
    assert ended.value.code == 2
    here, measured, there = capsys.readouterr().err.splitlines()
    assert "somebody started here" in here and "a measurement" in measured and "run 2026-a" in there


def test_a_torch_model_is_read_by_the_python_of_the_account(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "sizes.py"
    program.write_text("import sys; print(sys.argv[1:]); sys.exit(3)\n")
    monkeypatch.setattr(bench, "TORCH_SIZES", str(program))
    words = ["--torch", "train:make", "--model-file", "mine.csv"]
    monkeypatch.setattr("sys.argv", ["bench", "predict", *words])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to("/usr/bin/python3")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert bench.main() == 3
    assert capfd.readouterr().out == f"{words}\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        bench.main()
    assert "no python with torch" in capfd.readouterr().err
