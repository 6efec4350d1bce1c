"""What controller and worker exchange, without a cluster."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile

import pytest
from test_sweep import CLUSTER, load, report

from bench.results import store
from bench.sweep import executors, runner
from bench.worker import protocol
from bench.worker.protocol import Gradient, InputSpec, LaunchSpec, Spec, TrialSpec
from cluster.core import worker_files

TRIAL = TrialSpec("a1", "emulated", "tiny", 32, 224, 64, 20.0, input=InputSpec("/d", 2, "cores", 2, "drop", False))


def test_spec_and_events_are_equal_after_a_round_trip_to_the_worker(tmp_path, capsys):
    spec = Spec([LaunchSpec("ddp", [TRIAL], rate_mbit=250.0)], {"tiny": [Gradient(10, 0.5), Gradient(3, 1.0)]})
    path = tmp_path / "spec.json"
    path.write_bytes(spec.encode())
    assert protocol.read_spec(str(path), hashlib.sha256(spec.encode()).hexdigest()) == spec
    _, event = report(["head", "w1"])
    protocol.emit(event)
    line = capsys.readouterr().out
    assert protocol.parse("[0]<stdout>:" + line) == event
    assert protocol.parse(line[:-20]) is None
    assert protocol.parse("import torch") is None


def test_worker_refuses_a_spec_with_the_wrong_checksum(tmp_path):
    path = tmp_path / "spec.json"
    path.write_bytes(Spec([]).encode() + b" ")
    with pytest.raises(SystemExit, match="wrong checksum"):
        protocol.read_spec(str(path), hashlib.sha256(Spec([]).encode()).hexdigest())


@pytest.mark.parametrize(("call", "printed"), [("protocol.print_by_line()", "NCCL INFO\n"), ("pass", "")])
def test_lines_of_c_libraries_reach_a_pipe_although_the_rank_ends_at_once(call, printed, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    script = f"import ctypes, os; from bench.worker import protocol; {call}; "
    script += "ctypes.CDLL(None).printf(b'NCCL INFO\\n'); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == printed


def test_spec_lists_the_gradients_of_a_model_once_for_any_number_of_trials(tmp_path):
    folder, executor = store.RunFolder(tmp_path), executors.SshExecutor(CLUSTER)

    def size(**changes):
        plan = load(tmp_path, **changes)
        run = runner.Sweep(plan, folder, executor, {}, None, check=True)
        return len(run.build_spec(run.groups).encode())

    few, many = size(), size(repeats=5, batches=[32, 64, 96])
    assert many - few < 15 * 2 * 2 * 600


def test_nodes_receive_worker_and_spec_as_one_archive(monkeypatch):
    sent = {}

    def run_on_all(contract, names, command, content=None, timeout=60):
        sent.update(dict.fromkeys(names, (command, content)))
        return {}

    monkeypatch.setattr(executors.ssh, "run_on_all", run_on_all)
    spec = Spec([LaunchSpec("ddp", [TRIAL])])
    file = executors.SshExecutor(CLUSTER).install(["head", "w1"], spec)
    assert set(sent) == {"head", "w1"}
    with tarfile.open(fileobj=io.BytesIO(sent["w1"][1])) as tar:
        names = [f"/opt/bench-worker/{name}" for name in tar.getnames()]
        found = tar.extractfile(file.path.removeprefix("/opt/bench-worker/")).read()
    assert f"{worker_files.folder()}/__main__.py" in names
    assert found == spec.encode()
    assert hashlib.sha256(found).hexdigest() == file.sha256
