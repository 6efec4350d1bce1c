"""Numbers on the command line: what makes no sense is refused in one line before anything runs."""

from __future__ import annotations

import pytest

from bench import cli as bench_cli
from bench.worker import shards
from cluster import cli as cluster_cli
from cluster.core import config, paths, state

PREDICT = "predict --gpus 8 --gpu v100 --rate-gbps 10"
SENSELESS = [
    *("comm --seconds 0", "comm --seconds -1", "comm --seconds nan", "comm --nodes 0", "comm --nodes 1"),
    *("comm --nodes 65", "comm --to 1e9", "comm --from 1", "tune --minutes nan", "tune --minutes 0"),
    *("tune --minutes inf", "tune --batch 0", "jupyter --port 0", "jupyter --port 70000"),
    *("data make --out x --images 0", "data make --out x --images 1 --seed -1", "data bench x --cores 100000"),
    *("data bench x --seconds 1e308", "data bench x --rate inf", "data make --out x --images 1 --shard-mb nan"),
    *(f"{PREDICT} --batch 0", f"{PREDICT} --batch 1e3", f"{PREDICT} --single-rate 1e-300", f"{PREDICT} --cycle-ms -1"),
    *(f"{PREDICT} --fusion-mb inf", "predict --gpus nan --gpu v100", "predict --gpus 1e300 --gpu v100"),
    *("predict --gpus 8 --gpu v100 --rate-gbps 1e-300", "timeline x --compute-ms nan", "plan datapath --cores 0"),
    *("plan transfer --dataset-tb 1e308", "plan training-time --dataset-tb nan", "plan cluster --gpus -8"),
]


@pytest.mark.parametrize("words", SENSELESS)
def test_senseless_number_is_refused_by_bench(words: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench_cli.main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--" in err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["deploy", "scale", "plan", "config"])
@pytest.mark.parametrize("count", ["0", "-1", "65", "1.5", "x", "9" * 5000])
def test_senseless_number_of_nodes_is_refused_by_cluster(command: str, count: str, capsys) -> None:
    assert cluster_cli.main([command, "--nodes", count]) == 2
    err = capsys.readouterr().err
    assert err.startswith("cluster: --nodes: ")
    assert len(err) < 300


@pytest.mark.parametrize(
    "words",
    ["data make --images 1 --out", "data verify", "export --out", "explain --plot", "report --out", "timeline"],
)
def test_empty_path_is_refused(words: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench_cli.main([*words.split(), ""]) == 2
    assert "empty; give the path of a file or folder" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("file", ["true", "plot.gif", ".svg", "x" * 5000])
@pytest.mark.parametrize("words", ["predict", "explain", "plan network", "plan time-to-accuracy"])
def test_plot_of_an_unknown_format_is_refused(words: str, file: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench_cli.main([*words.split(), "--plot", file]) == 2
    err = capsys.readouterr().err
    assert "must end in one of .html, .json, .pdf, .png, .svg" in err
    assert err.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["comm", "tune", "sweep --dry-run", "data push x", "data bench x"])
@pytest.mark.parametrize("env", ["", ".", "..", "nosuch", "../../x", "/tmp", "x" * 5000])
def test_unknown_environment_is_refused_and_leaves_nothing(
    command: str, env: str, capsys, tmp_path, monkeypatch
) -> None:
    for module in (config, state):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(paths, "require_checkout", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shards, "load_index", lambda _: None)
    bench_cli.main([*command.split(), "--env", env])
    err = capsys.readouterr().err
    assert err.startswith(f"bench: ENV={env[:20]}")
    assert "no such environment" in err
    assert err.count("\n") == 1
    assert not any(tmp_path.iterdir())
