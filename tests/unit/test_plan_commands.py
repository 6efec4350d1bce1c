"""`bench plan` reproduces the known sizings and refuses nonsense."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cli import main
from bench.sizing.components import Speeds
from bench.sizing.datapath import flow, need
from bench.sizing.transfer import readable, transfers


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(["plan", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("gpus", "drives", "cores"), [(1, 1, 3), (4, 1, 12), (8, 2, 24), (16, 3, 48)])
def test_local_ssd_sizing_is_the_known_one(gpus: int, drives: int, cores: int) -> None:
    found = need(gpus, "ssd", Speeds())
    assert (found.drives, found.cores, found.nics) == (drives, cores, 0)


@pytest.mark.parametrize(("gpus", "drives", "cores", "nics"), [(1, 4, 3, 1), (64, 240, 192, 1), (256, 960, 768, 4)])
def test_nfs_sizing_is_the_known_one(gpus: int, drives: int, cores: int, nics: int) -> None:
    found = need(gpus, "nfs", Speeds())
    assert (found.drives, found.cores, found.nics) == (drives, cores, nics)


def test_sequential_shards_need_a_tenth_of_the_disks() -> None:
    assert need(256, "object", Speeds()).drives * 10 == need(256, "nfs", Speeds()).drives


@given(st.integers(1, 4096), st.sampled_from(["ssd", "hdd", "nfs", "object"]), st.booleans())
def test_what_is_needed_keeps_every_gpu_busy_and_one_less_does_not(gpus: int, storage: str, compressed: bool) -> None:
    speeds = Speeds()
    found = need(gpus, storage, speeds, compressed)
    have = {"drives": found.drives, "cores": found.cores, "nics": found.nics}
    assert flow(gpus, storage, speeds, have, compressed).gpu_use == pytest.approx(1)
    for part in ("drives", "cores"):
        less = {**have, part: have[part] - 1}
        if less[part]:
            starved = flow(gpus, storage, speeds, less, compressed)
            assert starved.gpu_use < 1
            assert starved.bottleneck == part


def test_datapath_takes_overrides_and_shows_its_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    got = answer(capsys, "datapath", "--gpus", "8", "--storage", "ssd", "--speed", "ssd=0.1", "--cores", "12")
    assert got["speeds_gbytes"]["ssd"] == 0.1
    assert got["needs"][0]["drives"] == 6
    assert got["flows"][0]["gpu_use"] == pytest.approx(0.5)
    assert main(["plan", "datapath", "--storage", "nfs", "--drives", "10"]) == 0
    assert "limited by" in capsys.readouterr().out


def test_datapath_feeds_the_images_that_predict_counts_with(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = ["--gpu", "a100", "--precision", "amp", "--batch", "256", "--gpus", "8"]
    assert main(["predict", *gpu, "--gpus-per-node", "8", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)["single_rate"]
    got = answer(capsys, "datapath", *gpu)
    # Three colours in single precision.
    assert got["needs"][0]["gpu_gbytes"] == pytest.approx(8 * alone * 224 * 224 * 3 * 4 / 1e9, rel=1e-4)
    assert answer(capsys, "datapath", *gpu, "--speed", "gpu_in=1")["needs"][0]["gpu_gbytes"] == 8
    assert main(["plan", "datapath", "--gpu", "a100", "--model", "bert-large"]) == 2
    assert "reads words" in capsys.readouterr().err


def test_plans_say_what_they_assume_and_pass_over_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    cluster, time = ["cluster", "--gpus", "16"], ["training-time", "--gpus", "16", "--dataset-tb", "1"]
    accuracy = ["time-to-accuracy", "--gpus", "16"]
    for words in (cluster, time, accuracy):
        assert main(["plan", *words, "--gpu", "a100"]) in (0, 1)
        assert "NVLink inside a node (200 GB/s); other links: --interconnect; nccl; tf32" in capsys.readouterr().out
        assert main(["plan", *words, "--gpu", "a100", "--batch", "5000"]) == 2
        assert "use a smaller --batch" in capsys.readouterr().err
    assert answer(capsys, *cluster, "--gpu", "a100", "--batch", "64,5000")["best"]["batch"] == 64


def test_a_petabyte_over_10_gbe_takes_about_two_weeks(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {one.component: one.seconds / 86400 for one in transfers(1000, Speeds())}
    assert 12 <= rows["10 GbE"] <= 15
    assert rows["1 GbE"] == pytest.approx(10 * rows["10 GbE"])
    assert main(["plan", "transfer"]) == 0
    assert "1.9 weeks" in capsys.readouterr().out


def test_durations_are_said_in_a_fitting_unit() -> None:
    assert [readable(seconds) for seconds in (30, 120, 7200, 172800, 14 * 86400, 9.1 * 365.25 * 86400)] == [
        "30.0 s",
        "2.0 min",
        "2.0 hours",
        "2.0 days",
        "2.0 weeks",
        "9.1 years",
    ]


def test_training_time_shrinks_from_years(capsys: pytest.CaptureFixture[str]) -> None:
    words = "training-time --dataset-tb 104 --model inceptionv3 --gpu k80 --gpus 80 --epochs 10 --gpu-price 0.5"
    got = answer(capsys, *words.split())
    one, many = got["projections"]
    assert one["hours"] > 5 * 365 * 24
    assert one["hours"] / many["hours"] == pytest.approx(80 * many["efficiency"])
    assert many["hours_low"] < many["hours"] < many["hours_high"]
    # 80 GPUs, and 10 nodes with a port of 10 Gbit/s.
    assert many["cost"] == pytest.approx(many["hours"] * (80 * 0.5 + 10 * (0.5 + 0.05)))
    assert got["inputs"]["images"] == pytest.approx(104e12 / 108e3)


def test_cluster_plan_is_the_cheapest_that_reaches_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    got = answer(
        capsys, "cluster", "--target-efficiency", "0.85", "--gpus", "64", "--gpu", "v100", "--gpus-per-node", "4"
    )
    assert got["best"]["efficiency"] >= 0.85
    costs = [option["cost_per_million_images"] for option in got["options"]]
    assert costs == sorted(costs)
    slower = ["cluster", "--target-efficiency", "0.85", "--gpus", "64", "--gpu", "v100", "--gpus-per-node", "4"]
    cheaper = answer(capsys, *slower, "--rate-gbps", "1", code=1)
    assert not cheaper["reached"]
    assert cheaper["best"]["cost_per_hour"] < got["best"]["cost_per_hour"]


def test_a_sure_plan_costs_at_least_as_much(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster", "--target-efficiency", "0.65", "--gpus", "32", "--gpu", "v100"]
    usual, sure = answer(capsys, *words), answer(capsys, *words, "--sure")
    assert sure["best"]["efficiency_low"] >= 0.65
    assert sure["best"]["cost_per_hour"] >= usual["best"]["cost_per_hour"]


def test_an_unreachable_target_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "cluster", "--target-efficiency", "1", "--gpus", "256", "--gpu", "v100"]) == 1
    assert "none reaches 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("cluster --target-efficiency 1.2 --gpu v100", "at most 1"),
        ("cluster --gpu v999", "k80"),
        ("cluster --gpu v100 --gpus 7 --gpus-per-node 2,4", "--gpus-per-node"),
        ("cluster --gpu v100 --rate-gbps 33", "--port-price tcp:33"),
        ("cluster --gpu v100 --port-price cheap", "TRANSPORT:GBPS=USD"),
        ("cluster --single-rate 100 --batch 32,64", "--batch"),
        ("datapath --gpus 0", "--gpus"),
        ("datapath --speed floppy=1", "ssd"),
        ("datapath --speed ssd=-1", "above 0"),
        ("datapath --cores 0", "--cores"),
        ("training-time --dataset-tb -1 --gpu v100", "--dataset-tb"),
        ("training-time --dataset-tb 1 --gpu v100 --gpus 12", "multiple"),
        ("transfer --efficiency 2", "--efficiency"),
    ],
)
def test_nonsense_exits_2_with_one_line(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words.split()]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_plan_takes_one_vocabulary_of_transports(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cluster", "--target-efficiency", "0.5", "--gpu", "v100", "--gpus-per-node", "4"]
    assert {key.split(":")[0] for key in answer(capsys, *words)["prices"]["port_hour"]} == {"tcp", "verbs"}
    assert answer(capsys, *words, "--transport", "rdma")["best"]["transport"] == "verbs"
    got = answer(capsys, *words, "--transport", "efa", "--port-price", "efa:100=0.5")
    assert got["best"]["transport"] == "efa"
    assert main(["plan", *words, "--transport", "efa"]) == 2
    assert "--port-price efa:GBPS=USD" in capsys.readouterr().err
