from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_cases import RUNS, copy

from bench.cli import main
from bench.explain import diagnosis, roofline, weakest_link
from bench.explain.command import NETWORK, explain_run
from bench.explain.weakest_link import Stage
from bench.results import runs, store
from bench.results.points import tabulate

WEAKEST = {
    "network-1g": ("fabric", "accelerator"),
    "compute-ib": ("accelerator", "fabric"),
    "data-hdd": ("storage", "accelerator"),
    "decode-cpu": ("decode", "accelerator"),
    "straggler": ("barrier", "accelerator"),
    "cpu-saturated": ("host", "allreduce"),
    "untuned-collective": ("allreduce", "fabric"),
}


@pytest.mark.parametrize("name", WEAKEST)
def test_minimum_cut_names_the_known_weakest_link_and_the_next(name: str) -> None:
    report = explain_run(runs.load(RUNS / name))
    assert (report["weakest"]["stages"], report["next"]["stages"]) == ([WEAKEST[name][0]], [WEAKEST[name][1]])


@pytest.mark.parametrize("name", WEAKEST)
def test_nothing_flows_above_the_cut_and_every_edge_names_its_source(name: str) -> None:
    report = explain_run(runs.load(RUNS / name))
    assert report["images_per_second"] <= report["weakest"]["images_per_second"] * 1.02
    for stage in report["path"]:
        assert stage["source"] in ("measured", "configured", "published", "not used", "not known", "given")
        if stage["use"] is not None:
            assert stage["use"] == pytest.approx(report["images_per_second"] / stage["images_per_second"])


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("network-1g", "10 Gbit/s instead of 1 Gbit/s"),
        ("compute-ib", "accelerators twice as fast"),
        ("data-hdd", "images always ready (faster storage or decoding)"),
        ("straggler", "w3 as fast as the others"),
    ],
)
def test_change_that_buys_most(name: str, best: str) -> None:
    changes = explain_run(runs.load(RUNS / name))["changes"]
    assert changes[0]["what"] == best
    assert [change["gain"] for change in changes] == sorted((change["gain"] for change in changes), reverse=True)


def test_nothing_is_predicted_from_a_saturated_host() -> None:
    assert explain_run(runs.load(RUNS / "cpu-saturated"))["changes"] == []


def test_single_node_is_limited_by_the_link_between_its_gpus(tmp_path: Path) -> None:
    def change(trial: dict[str, Any]) -> bool:
        trial["point"]["gpus_per_node"] = 4
        trial["breakdown_ms"]["exposed_comm"] = trial["step_ms"]["median"] / 2
        return trial["point"]["nodes"] == 1

    for point in tabulate(runs.load(copy("network-1g", tmp_path, change)).trials).points:
        assert diagnosis.diagnose(point).label == "link between GPUs"


def test_ring_of_all_ranks_crosses_a_card_once() -> None:
    point = tabulate(runs.load(RUNS / "network-1g").trials).points[0].conditions
    sixteen = point.model_copy(update={"nodes": 4, "gpus_per_node": 4})
    assert diagnosis.wire_bytes(sixteen) == pytest.approx(2 * 15 / 16 * 102228128)
    assert diagnosis.wire_bytes(sixteen.model_copy(update={"nodes": 1})) == 0


def test_wrong_nic_shows_the_bytes_per_interface(capsys) -> None:
    assert main(["explain", str(RUNS / "wrong-nic")]) == 0
    text = capsys.readouterr().out
    assert "over eth0, not fab0" in text
    assert "head sent per step: fab0 0.002 MB, eth0" in text


def test_shared_stage_bounds_all_nodes_together_and_local_ones_add_up() -> None:
    chain = [Stage("storage", 100, "measured", "", per_node=False), Stage("accelerator", 400, "measured", "")]
    cut = weakest_link.minimum_cut(chain, nodes=4)
    assert cut is not None and cut.stages == ("storage",) and cut.images_per_second == pytest.approx(100)
    after = weakest_link.minimum_cut(weakest_link.without(chain, cut.stages), nodes=4)
    assert after is not None and after.images_per_second == pytest.approx(400)


def test_cut_is_quick_and_right_for_thousands_of_nodes() -> None:
    chain = [Stage("accelerator", 2048.0, "measured", ""), Stage("fabric", 1000.0, "measured", "")]
    cut = weakest_link.minimum_cut(chain, nodes=2048)
    assert cut is not None and cut.stages == ("fabric",) and cut.images_per_second == pytest.approx(1000)


def test_unknown_capacities_are_no_limit() -> None:
    assert weakest_link.minimum_cut([Stage("decode", None, "not known", "")], nodes=2) is None


def test_given_capacity_moves_the_cut(capsys) -> None:
    run = str(RUNS / "data-hdd")
    assert main(["explain", run, "--capacity", "storage=400MB/s", "--capacity", "decode=50images/s", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["weakest"]["stages"] == ["decode"]
    assert report["weakest"]["images_per_second"] == pytest.approx(8 * 50)
    storage = next(stage for stage in report["path"] if stage["stage"] == "storage")
    assert storage["images_per_second"] == pytest.approx(8 * 400e6 / 110e3)
    assert storage["source"] == "given"


@pytest.mark.parametrize("text", ["storage", "storage=fast", "storage=-1MB/s", "moon=3MB/s", "storage=3parsecs"])
def test_bad_capacity_is_one_line_and_exit_2(text: str, capsys) -> None:
    assert main(["explain", str(RUNS / "data-hdd"), "--capacity", text]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: --capacity:") and error.count("\n") == 1


def test_trial_is_found_by_id_in_its_run_and_in_results(tmp_path: Path, monkeypatch, capsys) -> None:
    trial = runs.load(RUNS / "straggler").trials[1]
    assert main(["explain", f"{RUNS / 'straggler'}/{trial.id}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trial"] == trial.id
    monkeypatch.setattr(store, "RESULTS", tmp_path / "results")
    copy("straggler", tmp_path / "results" / "local")
    assert main(["explain", trial.id[:8]]) == 0
    assert "two nodes" in capsys.readouterr().out
    assert main(["explain", "abcdef123456"]) == 2
    assert "no trial abcdef123456" in capsys.readouterr().err


def test_failed_trial_is_explained_by_its_error(tmp_path: Path, capsys) -> None:
    folder = copy("straggler", tmp_path, lambda t: t.update(status="failed", error="out of memory", error_node="w1"))
    trial = runs.load(folder).trials[0]
    assert main(["explain", f"{folder}/{trial.id}"]) == 0
    assert "the trial failed on w1: out of memory" in capsys.readouterr().out


def test_roofline_of_resnet50_on_a_p100() -> None:
    point = tabulate(runs.load(RUNS / "one-node").trials).points[-1]
    found = roofline.roofline(point, None)
    assert found is not None
    # 219 images/s x 3 passes x 2 x 4.1 GMAC is 5.4 TFLOP/s, about half of a P100.
    assert found.achieved_tflops == pytest.approx(5.4, rel=0.03)
    assert found.bound == "compute"
    assert 0.4 < found.share < 0.6


def test_roofline_counts_the_activations_of_resnet50() -> None:
    from bench.catalogue import models

    # 11.1 million numbers per image is the figure in the literature for ResNet-50's convolutions.
    assert roofline.activations(models.get("resnet50")) == pytest.approx(11.1e6, rel=0.02)


def test_roofline_of_an_unknown_gpu_lists_the_known(capsys) -> None:
    assert main(["explain", str(RUNS / "compute-ib"), "--gpu", "v100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["roofline"]["device"] == "v100"
    assert main(["explain", str(RUNS / "compute-ib"), "--gpu", "abacus"]) == 2
    assert "p100" in capsys.readouterr().err


def test_roofline_is_drawn_and_says_that_it_is_emulated(tmp_path: Path, capsys) -> None:
    picture = tmp_path / "roof.svg"
    assert main(["explain", str(RUNS / "network-1g"), "--plot", str(picture)]) == 0
    text = picture.read_text()
    assert "Roofline on p100" in text and "EMULATED P100" in text and "51% of the roof" in text
    assert main(["explain", str(RUNS / "compute-ib"), "--plot", str(picture)]) == 2
    assert "--gpu" in capsys.readouterr().err


def test_line_left_out_is_named_for_a_run_and_for_a_trial(tmp_path: Path, capsys) -> None:
    folder = copy("straggler", tmp_path)
    (folder / "trials.jsonl").write_text("nonsense\n" + (folder / "trials.jsonl").read_text())
    trial = runs.load(folder).trials[-1]
    for target in (str(folder), f"{folder}/{trial.id}"):
        assert main(["explain", target]) == 0
        assert "the first is line 1" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(path.name for path in RUNS.iterdir() if path.is_dir()))
def test_no_change_exceeds_what_the_other_stages_allow(name: str) -> None:
    run = runs.load(RUNS / name)
    if not run.trials:
        return
    report = explain_run(run)
    stages = {stage["stage"]: stage["images_per_second"] for stage in report.get("path", [])}
    for change in report.get("changes", []):
        if "Gbit/s" in change["what"] or "fp16" in change["what"]:
            others = [rate for stage, rate in stages.items() if rate and stage not in NETWORK]
            assert change["images_per_second"] <= min(others) * 1.001
