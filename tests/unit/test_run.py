"""bench run: what is copied, what is refused, which command starts the ranks, and what is never written down."""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from bench.cli import build_parser
from bench.run import nodes as on_nodes
from bench.run import outcome, request, source
from bench.worker import run_rank
from cluster.core import config, contract, lock
from cluster.core.errors import InfraError, UserError
from cluster.core.state import State


def nodes(count: int, gpus: int = 0, storage: str = "glusterfs") -> contract.Contract:
    return contract.parse(
        {
            "name": "x",
            "provider": "local",
            "ssh": {"user": "ops", "key": "k", "known_hosts": "h"},
            "nodes": {
                name: {
                    **{"index": n, "role": "worker" if n else "head", "management_address": "10.0.0.1"},
                    **{"fabric_addresses": {}, "gpus": gpus, "gpu_model": "p100"},
                }
                for n, name in enumerate(["head", *(f"w{n}" for n in range(1, count))])
            },
            "fabrics": {
                "10g": {
                    "interface": "eth1",
                    "subnet": "10.1.0.0/24",
                    "rate_gbps": 10,
                    "transport": "tcp",
                    "shaped": False,
                }
            },
            "active_fabric": "10g",
            "storage": {"backend": storage, "server": "head", "path": "/shared"},
        }
    )


def parsed(*words: str) -> argparse.Namespace:
    argv = ["run", *words]
    return build_parser(argv).parse_args(argv)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print(1)")
    return tmp_path


def make(folder: Path, cluster: contract.Contract, *words: str) -> request.Request:
    args = parsed("--folder", str(folder), *words)
    return request.make(args, cluster, request.split_env(args.env)[1])


def test_words_after_the_dashes_are_the_scripts_own(folder: Path) -> None:
    made = make(folder, nodes(2), "--nodes", "1", "--", "python", "train.py", "--nodes", "7", "--", "x")
    assert made.words == ("python", "train.py", "--nodes", "7", "--", "x")
    assert made.nodes == ("head",)


@pytest.mark.parametrize(
    ("cluster", "words", "field"),
    [
        (nodes(2), ("--", "python", "missing.py"), "missing.py"),
        (nodes(2), ("--nodes", "3", "--", "python", "train.py"), "--nodes 3"),
        (nodes(2, storage="none"), ("--", "python", "train.py"), "cluster.storage.backend"),
        (nodes(2, gpus=4), ("--gpus-per-node", "8", "--", "python", "train.py"), "--gpus-per-node"),
        (nodes(2), (), "COMMAND"),
        (nodes(2), ("--", "python", ""), "COMMAND"),
        (nodes(2), ("--then", "destroy", "--detach", "--", "python", "train.py"), "--then destroy"),
        (nodes(2), ("--each-nodes", "1", "--", "python", "train.py"), "--each-nodes"),
        (nodes(2), ("--grid", "lr=0.1,../x", "--", "python", "train.py"), "--grid"),
        (nodes(2), ("--grid", f"lr=0.{'1' * 250}", "--", "python", "train.py"), "--grid: a folder's name"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    folder: Path, cluster: contract.Contract, words: tuple[str, ...], field: str
) -> None:
    with pytest.raises(UserError, match=f"^{field}") as error:
        make(folder, cluster, *words)
    assert "\n" not in str(error.value)


def test_spot_instances_are_not_stopped_because_that_deletes_the_outputs() -> None:
    cluster = config.load("aws")
    assert cluster.aws
    spot = cluster.model_copy(update={"aws": cluster.aws.model_copy(update={"spot": True})})
    with pytest.raises(UserError, match=r"^--then stop: spot instances .* use --then destroy"):
        request.check_spot("stop", spot)
    request.check_spot("destroy", spot)
    request.check_spot("stop", cluster.model_copy(update={"aws": cluster.aws.model_copy(update={"spot": False})}))


@pytest.mark.parametrize(
    ("count", "gpus", "hosts"), [(1, 2, "head:2"), (2, 4, "head:4,w1:4"), (6, 4, "head:4,w1:4,w2:4")]
)
def test_print_gives_the_talks_mpirun_line(folder: Path, count: int, gpus: int, hosts: str) -> None:
    cluster = nodes(count, gpus)
    (line,) = request.printed(make(folder, cluster, "--", "python", "train.py"), cluster, {})
    assert line.startswith(f"mpirun -np {count * gpus} -H {hosts}")
    assert "-bind-to none -map-by slot" in line
    assert "-x NCCL_SOCKET_IFNAME==eth1" in line
    assert line.endswith(" python train.py")
    assert "OMP_NUM_THREADS" not in line


def test_a_users_run_has_no_scale_model_and_ddp_uses_torchrun(folder: Path) -> None:
    cluster = nodes(2)
    (line,) = request.printed(make(folder, cluster, "--engine", "ddp", "--", "python", "train.py"), cluster, {})
    assert "torchrun --nnodes 2 --nproc-per-node 1" in line
    assert line.endswith("--no-python python train.py")
    assert f"HOROVOD_FUSION_THRESHOLD={128 << 20}" in line


def test_the_value_of_a_variable_is_in_no_record_print_or_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = nodes(2)
    made = make(folder, cluster, "--env", "TOKEN=hunter2", "--", "python", "train.py")
    assert made.variables == {"TOKEN": "hunter2"}
    (line,) = request.printed(made, cluster, {})
    assert "TOKEN=***" in line
    monkeypatch.setattr("sys.argv", ["bench", "run", "--env", "TOKEN=hunter2", "--env=OTHER=hunter2"])
    for text in (line, json.dumps(request.record(made, cluster, {})), repr(made), str(lock._signature())):
        assert "hunter2" not in text


def test_env_is_the_environment_or_a_variable() -> None:
    assert request.split_env(["aws", "A=1", "B=x=y"]) == ("aws", {"A": "1", "B": "x=y"})
    assert request.split_env([]) == ("local", {})


def test_runignore_wins_over_gitignore_and_git_and_venv_are_never_copied(folder: Path) -> None:
    for name in (".git/config", ".venv/x", "data/big.bin", "data/keep.txt", "sub/a.log"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    (folder / ".gitignore").write_text("*.log\n")
    assert {str(path) for path in source.to_copy(folder)} == {".gitignore", "data/big.bin", "data/keep.txt", "train.py"}
    (folder / ".runignore").write_text("data/*\n!data/keep.txt\n")
    found = {str(path) for path in source.to_copy(folder)}
    assert found == {".gitignore", ".runignore", "data/keep.txt", "sub/a.log", "train.py"}


def test_links_are_copied_as_links_and_those_that_nodes_cannot_follow_are_named(folder: Path, tmp_path_factory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (folder / "lib").mkdir()
    (folder / "lib/a.py").write_text("x")
    links = {"near": "lib", "far": outside, "onshare": "/shared/datasets/images", "loop": "loop", "skipped": outside}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    (folder / ".runignore").write_text("skipped/\nlib/near\n")
    chosen = list(source.to_copy(folder))
    assert {str(path) for path in chosen} == {".runignore", "far", "lib/a.py", "loop", "near", "onshare", "train.py"}
    assert source.links_out(folder, chosen, "/shared") == [(Path("far"), str(outside))]
    with (folder / "archive").open("wb") as out:
        source.write(folder, chosen, out)
    with tarfile.open(folder / "archive") as archive:
        assert archive.getmember("near").linkname == "lib"


def test_what_a_run_wrote_is_fetched_without_links_that_leave_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "share/runs/x/out"
    out.mkdir(parents=True)
    (out / "step-2.pt").write_text("2")
    (out / "latest").symlink_to("step-2.pt")
    (out / "best").symlink_to(out / "step-2.pt")
    cluster = nodes(1)
    cluster.storage.path = str(folder / "share")
    monkeypatch.setattr(on_nodes.ssh, "as_training_account", lambda contract, node, words: words)
    on_nodes.fetch(cluster, "x", tmp_path / "here", ("out", "*/out"))
    assert sorted(path.name for path in (tmp_path / "here/out").iterdir()) == ["latest", "step-2.pt"]
    assert (tmp_path / "here/out/latest").read_text() == "2"
    assert "not fetched: out/best is a link to an absolute path" in capsys.readouterr().err


def test_connection_that_breaks_during_a_fetch_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for script in ("exit 255", "head -c 700 /dev/zero; exit 255"):
        monkeypatch.setattr(on_nodes.ssh, "as_training_account", lambda *_, script=script: ["sh", "-c", script])
        with pytest.raises(InfraError, match=r"^node head: cannot read /shared/runs/x"):
            on_nodes.fetch(nodes(1), "x", tmp_path, ("out",))


def test_a_grid_has_one_folder_and_one_group_of_nodes_per_run(folder: Path) -> None:
    words = ("--grid", "lr=0.1,0.2", "--grid", "wd=0,1", "--each-nodes", "2", "--", "python", "train.py")
    made = make(folder, nodes(5), *words)
    assert [point["name"] for point in made.points()] == ["lr=0.1,wd=0", "lr=0.1,wd=1", "lr=0.2,wd=0", "lr=0.2,wd=1"]
    assert made.points()[3]["words"] == ["python", "train.py", "--lr", "0.2", "--wd", "1"]
    assert made.groups() == [("head", "w1"), ("w2", "w3")]


def test_a_resumed_run_gets_a_copy_of_what_each_of_its_points_wrote(folder: Path) -> None:
    cluster = nodes(2)
    words = ("--resume", "20260101-000000-abcd", "--grid", "lr=0.1,0.2", "--", "python", "train.py")
    made = make(folder, cluster, *words)
    text = on_nodes.resumed(cluster, made)
    for value in ("0.1", "0.2"):
        assert f"cp -a /shared/runs/20260101-000000-abcd/lr={value}/out /shared/runs/{made.id}/lr={value}/" in text
    assert request.record(made, cluster, {})["resumes"] == "20260101-000000-abcd"
    assert on_nodes.resumed(cluster, make(folder, cluster, "--", "python", "train.py")) == ""


@pytest.mark.parametrize(
    "environment",
    [
        {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"},
        {
            f"OMPI_COMM_WORLD_{name}": value
            for name, value in (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))
        },
        # torchrun under mpirun, which counts nodes
        {
            **{"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        },
    ],
)
def test_ranks_have_the_same_names_under_every_launcher(environment: dict[str, str]) -> None:
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert run_rank.ranks(environment) == expected


def ended(logs: Path, rank: int, code: int, at: float, text: str, stopped: bool = False) -> None:
    values = {"rank": rank, "node": f"n{rank}", "code": code, "stopped": stopped, "started": 0, "ended": at}
    (logs / f"rank-{rank}.json").write_text(json.dumps(values))
    (logs / f"rank-{rank}.log").write_text(text)


def test_the_rank_that_failed_first_is_not_one_that_the_launcher_ended(tmp_path: Path) -> None:
    ended(tmp_path, 0, -15, 1.0, "a", stopped=True)
    ended(tmp_path, 1, 7, 2.0, "first\nboom\n")
    ended(tmp_path, 2, 1, 3.0, "lost connection")
    found = outcome.first_failure(tmp_path)
    assert found == outcome.Failure(1, "n1", 7, ("first", "boom"))


def test_the_same_error_on_all_ranks_is_rank_0s(tmp_path: Path) -> None:
    for rank in range(3):
        ended(tmp_path, rank, 1, 3.0 - rank, f"{rank}\nSyntaxError")
    found = outcome.first_failure(tmp_path)
    assert found is not None and found.rank == 0


def test_damaged_records_of_a_run_do_not_hide_how_it_ended(tmp_path: Path) -> None:
    """A full share cuts records off; a script may call its own numbers as we call ours."""
    logs, out = tmp_path / "logs", tmp_path / "out"
    logs.mkdir()
    out.mkdir()
    ended(logs, 1, 7, 2.0, "boom\n")
    for name, content in {"rank-0": '{"rank": 0, "no', "rank-2": "{}", "rank-3": "[1]"}.items():
        (logs / f"{name}.json").write_text(content)
    (tmp_path / "state.json").write_text('{"state": "failed", "hosts": ["n1"]}')
    (out / "result.json").write_text('{"state": 3, "loss": 0.5, "name": "x"}')
    record = {"points": [{"name": ".", "values": {}}]}
    assert outcome.explain(tmp_path, record, shown_rank=True) == ["rank 1 on n1 failed first (exit code 7)", "  boom"]
    row = {"state": "failed", "nodes": "n1", "seconds": None, "loss": 0.5}
    assert outcome.summary(tmp_path, record) == [row]
    (tmp_path / "state.json").write_text('{"state"')
    assert outcome.summary(tmp_path, record)[0]["state"] == "unknown, state.json is damaged"


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", '{"id": "r"}', '{"id', ""]
    + [f'{{"id": "r", "question": {words}}}' for words in ("3", "[]", '["echo", "active"]', '["ssh", "a\\u0000b"]')],
)
def test_damaged_note_of_a_run_does_not_stop_commands(tmp_path: Path, content: str) -> None:
    state = State("x")
    state.run = tmp_path / "run.json"
    state.run.write_text(content)
    assert state.detached_run() is None


def test_packages_are_found_before_the_clusters_own(folder: Path) -> None:
    (folder / "r.txt").write_text("humanize\n")
    asked = make(folder, nodes(2), "--requirements", str(folder / "r.txt"), "--", "python", "train.py")
    record = request.record(asked, nodes(2), {}, "/shared/venvs/1")
    assert record["requirements"] == ["humanize"]
    assert record["path"][0] == "/shared/venvs/1/bin" and len(record["path"]) == 2


@pytest.mark.parametrize("line", ["-r other.txt", "-e .", "./wheel.whl", "--constraint=c.txt"])
def test_requirements_that_name_another_file_are_refused(folder: Path, line: str) -> None:
    (folder / "r.txt").write_text(f"humanize\n{line}\n")
    with pytest.raises(UserError, match="line 2 names another file"):
        make(folder, nodes(2), "--requirements", str(folder / "r.txt"), "--", "python", "train.py")


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ("ERROR: Could not find a version of x\nERROR: No matching distribution found for x", UserError),
        ("WARNING: connection broken by NewConnectionError\nERROR: Could not find a version of x", InfraError),
        ("No space left on device", InfraError),
    ],
)
def test_an_unknown_package_is_told_from_an_index_out_of_reach(output: str, kind: type[Exception]) -> None:
    found = on_nodes.not_installed("head", subprocess.CompletedProcess([], 1, "", output))
    assert type(found) is kind
    assert ("version of x" if "ERROR" in output else output) in str(found)
