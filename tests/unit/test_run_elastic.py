"""Elastic runs: what is refused, which launcher starts, and which nodes it may use."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_run import ended, make, nodes

from bench.run import outcome, request
from bench.worker import run_agent, run_drain, run_hosts, run_rank, run_torchrun
from cluster.core import contract
from cluster.core.config import ROOT
from cluster.core.errors import UserError

SCRIPT = ("--", "python", "train.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print(1)")
    return tmp_path


@pytest.mark.parametrize(
    ("cluster", "words", "field"),
    [
        (nodes(4), ("--max-nodes", "3"), "--max-nodes: only with --min-nodes"),
        (nodes(4), ("--min-nodes", "2", "--max-nodes", "5"), "--max-nodes 5: the cluster has 4"),
        (nodes(4), ("--min-nodes", "3", "--max-nodes", "2"), "--max-nodes 2: give 3"),
        (nodes(1), ("--min-nodes", "1"), "--max-nodes 1: give 2"),
        (nodes(4), ("--min-nodes", "2", "--nodes", "3"), "--nodes: not with --min-nodes"),
        (nodes(4), ("--min-nodes", "2", "--grid", "lr=1,2"), "--grid: not with --min-nodes"),
    ],
)
def test_what_cannot_be_elastic_is_refused(
    folder: Path, cluster: contract.Contract, words: tuple[str, ...], field: str
) -> None:
    with pytest.raises(UserError, match=f"^{field}"):
        make(folder, cluster, *words, *SCRIPT)


def test_horovodrun_gets_the_range_and_the_live_nodes(folder: Path) -> None:
    cluster = nodes(4, gpus=2)
    asked = make(folder, cluster, "--min-nodes", "1", "--max-nodes", "3", *SCRIPT)
    record = request.record(asked, cluster, {})
    assert record["elastic"] == {"min": 1, "max": 3, "start": 2}
    (group,) = record["groups"]
    # All nodes are candidates: one that is not needed now replaces another.
    assert group["hosts"] == ["head", "w1", "w2", "w3"]
    line = " ".join(group["argv"])
    assert "--gloo -np 4 --min-np 2 --max-np 6" in line
    assert f"--host-discovery-script cat /run/run-{asked.id}-launch/hosts" in line
    # A node that joins later has no worker of its own.
    assert line.endswith(f"python3 /shared/runs/{asked.id}/worker run_rank")
    # What people type has no file of live nodes.
    (typed,) = request.printed(asked, cluster, {})
    assert "-H head:2,w1:2,w2:2,w3:2" in typed and "/run/run-" not in typed


def test_torchrun_gets_the_range_on_every_live_node(folder: Path) -> None:
    cluster = nodes(3)
    asked = make(folder, cluster, "--engine", "ddp", "--min-nodes", "2", *SCRIPT)
    line = " ".join(request.record(asked, cluster, {})["groups"][0]["argv"])
    assert f" run_torchrun /run/run-{asked.id}-launch/hosts env " in line
    assert "--nnodes 2:3 --nproc-per-node 1" in line and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in line
    (typed,) = request.printed(asked, cluster, {})
    assert "run_torchrun" not in typed and typed.endswith(" python train.py")


def test_a_log_belongs_to_a_place_on_a_node_not_to_a_rank(folder: Path) -> None:
    cluster = nodes(2)
    for words, name in (((), "rank-1.log"), (("--min-nodes", "1"), f"rank-{socket.gethostname()}.0.log")):
        asked = make(folder, cluster, *words, *SCRIPT)
        (folder / "run.json").write_text(json.dumps(request.record(asked, cluster, {})))
        environment = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}
        assert Path(str(run_rank.request(folder, ".", environment)["log"])).name == name


def test_a_lost_rank_of_a_run_that_went_on_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    ended(tmp_path / "logs", 1, -9, 2.0, "boom")
    record = {"points": [{"name": ".", "values": {}}]}
    (tmp_path / "state.json").write_text('{"state": "ok", "hosts": ["n1"]}')
    assert outcome.explain(tmp_path, record, shown_rank=False) == []
    (tmp_path / "state.json").write_text('{"state": "failed", "hosts": ["n1"]}')
    assert "rank 1 on n1 failed first (signal 9)" in outcome.explain(tmp_path, record, shown_rank=False)


@pytest.mark.parametrize(("says", "answers"), [(b"SSH-2.0-x\r\n", True), (b"", False)])
def test_a_node_that_accepts_connections_but_hangs_does_not_answer(says: bytes, answers: bool) -> None:
    """As a paused one: its kernel completes the connection, no process serves it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if says:
            threading.Thread(target=lambda: server.accept()[0].sendall(says), daemon=True).start()
        assert run_hosts.answers("127.0.0.1", port) == answers
    assert not run_hosts.answers("127.0.0.1", port)


class Scene:
    """Nodes that the test makes answer or not, and the file that the launcher reads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live, self.folder, self.prepared = {"head", "w1", "w2"}, folder, list[str]()
        self.file, self.log = folder / "hosts", folder / "hosts.jsonl"
        monkeypatch.setattr(run_hosts, "PAUSE", 0.02)
        monkeypatch.setattr(run_hosts, "answers", lambda host: host in self.live)
        monkeypatch.setattr(run_hosts, "prepare", self.prepare)
        self.hosts = run_hosts.Hosts(folder, {"id": "x", "gpus_per_node": 2}, self.file, self.log)

    def prepare(self, host: str, *_: object) -> bool:
        self.prepared.append(host)
        return True

    def becomes(self, *hosts: str) -> bool:
        wanted = "".join(f"{host}:2\n" for host in hosts)
        deadline = time.monotonic() + 5
        while self.file.read_text() != wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.file.read_text() == wanted


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(tmp_path, monkeypatch)
    yield made
    made.hosts.ended.set()


def test_nodes_leave_and_join_as_they_stop_and_start_to_answer(scene: Scene) -> None:
    scene.live.remove("w2")
    every = ["head", "w1", "w2"]
    scene.hosts.start(every)
    assert scene.hosts.wait(every, 2, 5)
    assert scene.becomes("head", "w1")
    scene.live.add("w2")
    assert scene.becomes("head", "w1", "w2")
    scene.live.remove("w1")
    assert scene.becomes("head", "w2")
    scene.live.add("w1")
    assert scene.becomes("head", "w1", "w2")
    # A node that comes back gets its agent, and loses what an earlier rank left there.
    assert scene.prepared.count("w1") == 2
    rows = [json.loads(line) for line in scene.log.read_text().splitlines()]
    assert {row["reason"] for row in rows if row["host"] == "w1"} == {"", "does not answer"}


def test_a_node_that_joins_gets_the_variables_and_loses_old_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command as a shell runs it, against a stand-in of the agent."""
    monkeypatch.setattr(run_agent, "runtime", lambda run: tmp_path)
    received = []

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            received.append(json.loads(connection.makefile().readline()))
            connection.sendall(b"0\n")

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        assert run_hosts.prepare(os.uname().nodename, tmp_path, "x", '{"TOKEN": "y"}')
    assert received == [{"clear": True}]
    assert (tmp_path / "variables").read_text() == '{"TOKEN": "y"}'
    assert (tmp_path / "variables").stat().st_mode & 0o777 == 0o600


def test_a_start_without_enough_nodes_is_given_up(scene: Scene) -> None:
    scene.live = {"head"}
    scene.hosts.start(["head", "w1"])
    assert not scene.hosts.wait(["head", "w1"], 2, 0.3)


class Metadata(BaseHTTPRequestHandler):
    """Stand-in of the instance metadata service: IMDSv2, with a spot notice once the test gives one."""

    notice = ""

    def answer(self, code: int, text: str = "") -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self) -> None:
        known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(200 if known else 400, "a-token")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "a-token":
            self.answer(401)
        elif self.path == "/latest/meta-data/spot/instance-action" and type(self).notice:
            self.answer(200, type(self).notice)
        else:
            self.answer(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Metadata, "notice", "")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_spot_notice_takes_the_node_out_before_it_goes(scene: Scene, metadata: str) -> None:
    every = ["head", "w1"]
    scene.hosts.start(every)
    scene.hosts.wait(every, 2, 5)
    threading.Thread(target=run_drain.watch, args=(scene.folder, "w1", metadata, 0.02), daemon=True).start()
    time.sleep(0.2)
    assert scene.becomes("head", "w1")
    Metadata.notice = '{"action": "terminate", "time": "2026-11-18T21:00:00Z"}'
    assert scene.becomes("head")
    assert json.loads((scene.folder / "draining/w1").read_text())["action"] == "terminate"


def test_no_metadata_service_is_no_notice() -> None:
    assert run_drain.notice("http://127.0.0.1:9") is None


def test_a_rank_ends_when_its_launchers_connection_is_gone() -> None:
    """A launcher that loses its node closes no process there: ssh without a terminal sends no signal."""
    program = "from bench.worker import run_rank; run_rank.end_with_launcher()"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    assert process.stdout
    process.stdout.close()
    assert process.wait(10) == 1


@pytest.mark.parametrize(
    ("scripts", "code", "starts"),
    [
        ({"head": "exit 0", "w1": "exit 0"}, 0, {"head": 1, "w1": 1}),
        ({"head": "exit 1", "w1": "exit 1"}, 1, {"head": 1, "w1": 1}),
        # Tried again while the other goes on.
        ({"head": "sleep 2", "w1": "exit 1"}, 0, {"head": 1, "w1": 3}),
    ],
)
def test_torchrun_runs_on_every_node_and_again_where_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str], code: int, starts: dict[str, int]
) -> None:
    (tmp_path / "hosts").write_text("".join(f"{host}:1\n" for host in scripts))
    started: list[str] = []

    def start(host: str, words: list[str]) -> subprocess.Popen[bytes]:
        started.append(host)
        return subprocess.Popen(["sh", "-c", scripts[host]])

    monkeypatch.setattr(run_torchrun, "start", start)
    monkeypatch.setattr(run_torchrun, "PAUSE", 0.05)
    monkeypatch.setattr(run_torchrun, "SECONDS_UNTIL_AGAIN", 0.6)
    monkeypatch.setattr("sys.argv", ["run_torchrun", str(tmp_path / "hosts"), "torchrun"])
    with pytest.raises(SystemExit) as end:
        run_torchrun.main()
    assert end.value.code == code
    assert all(started.count(host) >= count for host, count in starts.items())
    assert started.count("head") == 1
