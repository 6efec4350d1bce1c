"""Epochs against the batch, and published wall times of whole trainings."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.predict import anchors
from bench.predict.inputs import Setup
from bench.sizing import accuracy, epochs
from bench.sizing.costs import Prices

LARS, LAMB = (next(one for one in epochs.WORKLOADS if one.optimizer == name) for name in ("lars", "lamb"))
IMAGES = 90 * epochs.IMAGENET


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", "time-to-accuracy", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("workload", "batches", "mean_error"), [(LARS, 12, 0.045), (LAMB, 13, 0.065)])
def test_batches_left_out_are_predicted(workload: epochs.Workload, batches: int, mean_error: float) -> None:
    known = epochs.points(workload)
    assert len(known) == batches
    assert epochs.curve(workload).mean_error < mean_error


@pytest.mark.parametrize("left_out", epochs.points(LARS), ids=lambda point: str(point.batch))
def test_each_lars_point_lies_in_the_interval_without_it(left_out: epochs.Point) -> None:
    found = epochs.fit([point for point in epochs.points(LARS) if point != left_out]).need(left_out.batch)
    assert found.low <= left_out.epochs <= found.high


def test_goyals_hour_lies_in_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    # One node of 8 P100 took 29 hours.
    single = str(IMAGES / 29 / 3600 / 8)
    words = ["--epochs", "90", "--single-rate", single, "--batch", "32", "--gpus", "256", "--gpus-per-node", "8"]
    (found,) = answer(capsys, *words, "--rate-gbps", "50", "--interconnect", "nvlink")["answers"]
    assert found["hours_low"] <= 1.0 <= found["hours_high"]


@pytest.mark.parametrize("single", [(219, 195), (228, 203)], ids=["profile", "its own"])
@pytest.mark.parametrize(("gpus", "batch", "minutes"), [(128, 64, 83), (128, 32, 100), (256, 32, 69)])
def test_tensorpacks_wall_times_lie_in_the_interval_anchored_on_the_first(
    gpus: int, batch: int, minutes: int, single: tuple[int, int]
) -> None:
    """tensorpack/benchmarks ResNet-Horovod/README.md: 32 P100 with batch 64 took 5:09 h."""
    rate = dict(zip((64, 32), single, strict=True))
    first = Setup(
        *("resnet50", 64, 64000 / rate[64], 32, 8, None, "verbs"), gpu="p100", interconnect="nvlink", rate_unknown=True
    )
    fitted = anchors.parameters(anchors.Anchor(32, IMAGES / (5 * 3600 + 9 * 60), None), first)
    asked = replace(first, gpus=gpus, batch=batch, single_step_ms=1000 * batch / rate[batch])
    found = accuracy.answer(asked, None, 90, epochs.IMAGENET, Prices(1, 1, {}), fitted)
    assert found.hours_low is not None and found.hours_high is not None
    assert found.hours_low <= minutes / 60 <= found.hours_high


def test_aws_wall_times_lie_in_the_interval_anchored_on_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    single = str(IMAGES / (6 * 3600 + 12 * 60) / 8)
    words = ["--epochs", "90", "--single-rate", single, "--precision", "amp", "--batch", "256", "--gpus", "16,64"]
    found = answer(capsys, *words, "--gpus-per-node", "8", "--rate-gbps", "25", "--interconnect", "nvlink")["answers"]
    for one, hours in zip(found, (3 + 16 / 60, 54 / 60), strict=True):
        assert one["hours_low"] <= hours <= one["hours_high"]


def test_sgd_has_a_fixed_schedule_and_no_data_for_large_batches(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "v100", "--optimizer", "sgd", "--target", "76", "--gpus"]
    small, large = answer(capsys, *words, "8,512")["answers"]
    assert (small["epochs"], large["epochs"], large["hours"]) == (90, None, None)
    assert main(["plan", "time-to-accuracy", *words, "512"]) == 2
    assert "no data for SGD at a batch of 32,768" in capsys.readouterr().err


def test_more_gpus_stop_helping_and_the_plot_has_a_title(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "time.svg"
    found = answer(capsys, "--gpu", "v100", "--gpus", "8,64,4096", "--plot", str(plot))
    assert "Time to accuracy: resnet50, v100" in plot.read_text()
    assert 64 < found["enough_gpus"] <= 16384
    assert [batch for batch, _ in found["curve"]["residuals"]] == [point.batch for point in epochs.points(LARS)]
    notes = [one["note"] for one in found["answers"]]
    assert notes[1] == ""
    assert notes[2].startswith("extrapolated")


def test_the_last_line_says_up_to_where_gpus_help_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "time-to-accuracy", "--gpu", "v100", "--gpus", "64"]
    assert main([*words, "--optimizer", "sgd", "--target", "76"]) == 0
    # 64 images per GPU and a batch of 8,192 at most.
    assert capsys.readouterr().out.endswith("no data for more than 128 GPUs with this batch per GPU\n")
    # A slow network loses from one node to two, and wins beyond.
    assert main([*words, "--rate-gbps", "4"]) == 0
    told = re.fullmatch(r"more than ([\d,]+) GPUs save .*67,840", capsys.readouterr().out.splitlines()[-1])
    assert told is not None
    assert int(told[1].replace(",", "")) > 64


def test_bert_is_trained_on_the_sequences_of_its_data(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "bert-large", "--gpu", "a100", "--gpus", "64", "--batch", "8"]
    assert answer(capsys, *words) == answer(capsys, *words, "--seq-len", "512")
    assert main(["plan", "time-to-accuracy", *words, "--seq-len", "128"]) == 2
    assert "the data behind the target have 512" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--gpu v100 --target 80", "no data reach 80"),
        ("--gpu v100 --model vgg16", "no data for vgg16"),
        ("--gpu v100 --samples 5", "needs --epochs"),
        ("--gpu v100 --rate-gbps 10,25", "bench plan network"),
    ],
)
def test_what_no_data_reach_is_one_line(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "time-to-accuracy", *words.split()]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_plot_has_the_requested_sizes_also_where_a_whole_node_has_no_answer(tmp_path: Path) -> None:
    """Eight GPUs with batch 2000 exceed the batches at which SGD reaches the target; one GPU does not."""
    path = tmp_path / "x.svg"
    words = ["--gpus", "1", "--batch", "2000", "--optimizer", "sgd", "--target", "76"]
    words += ["--single-rate", "300", "--plot", str(path)]
    assert main(["plan", "time-to-accuracy", *words]) == 0
    assert "<svg" in path.read_text()
