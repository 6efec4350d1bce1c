"""Where a model is cut for several devices, what the cut costs, and when it beats data parallelism."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import networkx as nx
import pytest
from test_own_model import as_file

from bench.catalogue import models, units
from bench.cli import main
from bench.plan import stages
from bench.predict import split
from bench.predict.inputs import DEFAULTS, Setup
from bench.predict.step import predict


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", "placement", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", models.NAMES)
def test_units_hold_every_layer_once_in_an_acyclic_graph(name: str) -> None:
    model, parts, network = models.get(name), units.of(name), units.graph(name)
    assert [layer for part in parts for layer in part.layers] == list(model.layers)
    assert len({part.name for part in parts}) == len(parts)
    assert nx.is_directed_acyclic_graph(network) and list(nx.topological_sort(network)) == list(range(len(parts)))
    # A cut between two units passes what the second one reads.
    for at in range(1, len(parts)):
        assert units.crossing(network, range(at)) == (parts[at].inputs, units.tied(name))


def test_edges_pass_what_the_published_networks_pass() -> None:
    resnet = {unit.name: unit for unit in units.of("resnet50")}
    assert resnet["layer1.0"].inputs == 64 * 56 * 56 and resnet["layer3.0"].inputs == 512 * 28 * 28
    assert {unit.name: unit.inputs for unit in units.of("inceptionv3")}["Mixed_7b"] == 1280 * 8 * 8
    assert {unit.name: unit.inputs for unit in units.of("vgg16")}["classifier.0"] == 512 * 7 * 7
    assert units.of("gpt2")[1].inputs == 768 * 1024
    # The 3x3 convolution in the middle of a bottleneck needs one row from each side, the first one five in all.
    assert resnet["layer1.1"].halo == 2 * 56 * 64 and resnet["conv1"].halo == 5 * 224 * 3


@pytest.mark.parametrize(("name", "count"), [("alexnet", 2), ("alexnet", 3), ("vgg16", 4), ("vit-b16", 3), ("gpt2", 5)])
@pytest.mark.parametrize("per_value", [0.0, 1e-7, 1e-5])
def test_no_other_cut_is_better(name: str, count: int, per_value: float) -> None:
    parts, total = units.of(name), models.get(name).macs

    def slowest(ends: tuple[int, ...]) -> float:
        edges = (0, *ends, len(parts))
        work = [sum(unit.macs for unit in parts[a:b]) / total for a, b in pairwise(edges)]
        return max(*work, *(parts[at].inputs * per_value for at in ends))

    found = stages.cut(name, count, None, per_value)
    assert [found[0].first, *(stage.last for stage in found)] == [0, *(stage.first for stage in found[1:]), len(parts)]
    ours = max(*(stage.share for stage in found), *(stage.sends * per_value for stage in found))
    assert ours == pytest.approx(min(map(slowest, combinations(range(1, len(parts)), count - 1))))


def test_stages_stay_equal_where_every_edge_is_the_limit() -> None:
    shares = [stage.share for stage in stages.cut("gpt2-medium", 3, None, 1.0)]
    assert max(shares) < 1.2 / 3


@pytest.mark.parametrize("schedule", stages.SCHEDULES)
@pytest.mark.parametrize(("deep", "pieces"), [(1, 4), (3, 5), (4, 4), (4, 1), (7, 13)])
def test_every_stage_does_each_micro_batch_once_and_the_bubble_is_the_known_one(schedule, deep, pieces) -> None:
    for position in range(deep):
        found = stages.order(schedule, position, deep, pieces)
        assert sorted(found) == sorted((kind, k) for kind in "FB" for k in range(pieces))
        assert all(found.index(("F", k)) < found.index(("B", k)) for k in range(pieces))
    time = stages.pipeline_ms([3.0] * deep, [0.0] * (deep - 1), schedule, pieces)
    assert time == pytest.approx(3.0 * (pieces + deep - 1))
    assert 1 - 3.0 * pieces / time == pytest.approx(split.idle_share(deep, pieces))


def test_a_slow_edge_is_the_limit_of_the_pipeline() -> None:
    # 20 tensors over an edge that is slower than the stages. GPipe sends the gradients after all activations.
    time = stages.pipeline_ms([3.0, 3.0], [10.0], "gpipe", 20)
    assert time == pytest.approx(2 * 20 * 10.0 + 2 * 3.0)


def test_1f1b_keeps_fewer_activations_than_gpipe() -> None:
    setup = Setup("vgg16", 64, 400.0, 4, 1, 10.0)
    one, all_at_once = (split.pipeline(setup, DEFAULTS, schedule=name) for name in stages.SCHEDULES)
    assert one.memory_gb < 0.5 * all_at_once.memory_gb
    # It waits for each gradient before it goes on, so it hides less of a slow link.
    assert one.step_ms > 1.1 * all_at_once.step_ms
    fast = replace(setup, rate_gbps=400.0, transport="verbs")
    one, all_at_once = (split.pipeline(fast, DEFAULTS, schedule=name) for name in stages.SCHEDULES)
    assert one.step_ms == pytest.approx(all_at_once.step_ms, rel=0.05)


def test_sharded_weights_hide_behind_compute_and_are_the_limit_without_it() -> None:
    assert split.sharded_ms([10.0] * 4, [20.0] * 4, [1.0] * 4) == pytest.approx(1 + 120 + 1)
    # Two gathers of each unit but one, and a scatter of each.
    assert split.sharded_ms([0.001] * 4, [0.002] * 4, [5.0] * 4) == pytest.approx(5 * (4 + 3 + 4), rel=0.01)


def test_every_method_sends_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    found = {one["method"]: one for one in answer(capsys, "--model", "vgg16")["methods"]}
    gradients = models.get("vgg16").gradient_bytes
    assert found["data"]["sent_bytes"] == pytest.approx(1.5 * gradients)
    assert found["fsdp"]["sent_bytes"] == pytest.approx(2.25 * gradients)
    assert found["tensor"]["sent_bytes"] < 0.25 * found["data"]["sent_bytes"]
    assert found["fsdp"]["memory_gb"] < found["data"]["memory_gb"]


def test_the_comparison_with_data_parallelism_is_that_of_bench_predict() -> None:
    setup = Setup("resnet50", 64, 290.0, 4, 1, 10.0)
    assert split.data(setup, DEFAULTS).step_ms == pytest.approx(predict(setup).step_ms)


def test_methods_meet_data_parallelism_where_nothing_is_split() -> None:
    setup = Setup("alexnet", 64, 100.0, 1, 1, None)
    for one in split.ways(setup, DEFAULTS, count=1):
        assert one.step_ms == pytest.approx(100.0) and one.sent_bytes == 0


def test_a_faster_link_never_makes_a_method_slower() -> None:
    setup = Setup("vgg16", 64, 400.0, 4, 1, 1.0)
    for slow, fast in pairwise((1.0, 5.0, 10.0, 20.0, 23.0, 25.0, 50.0, 100.0)):
        before, after = (split.ways(split.at_rate(setup, rate), DEFAULTS) for rate in (slow, fast))
        for one, two in zip(before, after, strict=True):
            assert two.step_ms <= 1.001 * one.step_ms, (one.method, slow, fast)


def test_replicas_of_a_pipeline_add_up_their_gradients() -> None:
    setup = Setup("vgg16", 64, 400.0, 4, 1, 10.0)
    deep, wide = (split.pipeline(setup, DEFAULTS, depth=depth, count=8) for depth in (4, 2))
    assert len(deep.cut) == 4 and len(wide.cut) == 2
    parameters = models.get("vgg16").parameters
    activations = wide.cut[0].sends * 2 * 128 * 4 / 2
    assert wide.sent_bytes == pytest.approx(activations + 4 * parameters / 2)


def test_stages_of_a_language_model_share_the_word_embedding() -> None:
    cut = stages.cut("gpt2", 3)
    table = 50257 * 768
    assert [stage.shares_parameters for stage in cut] == [table, 0, table]
    assert sum(stage.parameters for stage in cut) == models.get("gpt2").parameters + table
    assert stages.cut("gpt2", 1)[0].shares_parameters == 0


def test_memory_moves_the_cut(capsys: pytest.CaptureFixture[str]) -> None:
    free = answer(capsys, "--model", "vgg16", "--devices", "3", "--batch", "96")
    most = max(stage["memory_gb"] for stage in free["stages"])
    tight = answer(capsys, "--model", "vgg16", "--devices", "3", "--batch", "96", "--memory-gb", str(0.9 * most))
    assert max(stage["memory_gb"] for stage in tight["stages"]) <= 0.9 * most
    assert tight["stages"] != free["stages"]
    steps = [one["step_ms"] for found in (tight, free) for one in found["methods"] if one["method"] == "pipeline"]
    assert steps[0] >= steps[1]


def test_text_shows_cut_bubble_and_when_each_method_wins(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "gpt2-medium", "--single-rate", "12", "--batch", "4", "--devices", "8", "--stages", "4"]
    assert main(["plan", "placement", *words]) == 0
    text = capsys.readouterr().out
    assert "embeddings .. h.6" in text and "two replicas" in text and "Bubble: 16%" in text
    assert "both hold the word embedding" in text and "sharded weights (FSDP)" in text
    assert "from 1 until" in text and "data parallel (Horovod)" in text.partition("Fastest")[2]


def test_micro_batches_follow_the_published_rates_of_small_batches() -> None:
    setup = Setup("resnet50", 64, 292.0, 4, 1, 10.0, gpu="p100", compute_doubt=0.08)
    assert split.micro_step_ms(setup, 32) / setup.single_step_ms == pytest.approx(32 / 195 / (64 / 219), rel=0.05)
    assert split.micro_step_ms(replace(setup, gpu=None), 64) == setup.single_step_ms


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--devices 20", "--devices: 20 stages, but resnet50 has 18 layers"),
        ("--model alexnet --devices 18 --stages 9", "--stages: 9 stages, but alexnet has 8 layers"),
        ("--model nosuch", "model: 'nosuch' is not known"),
        ("--devices 4 --stages 3", "--stages: 3 does not divide --devices 4"),
        ("--devices 4 --gpus-per-node 3", "--gpus: 4 is not a multiple"),
        ("--micro-batches 7", "--micro-batches: 7 does not divide the 256 samples"),
        ("--memory-gb 0.5", "--memory-gb: no cut of resnet50 into 4 stages fits"),
        ("--rate-gbps 0", "--rate-gbps"),
        ("--gpu abacus", "gpu: 'abacus' is not known"),
        ("--seq-len 10", "--seq-len"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(words: str, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "placement", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"bench: {field}") and error.count("\n") == 1


def test_a_model_file_is_refused_because_it_lacks_what_passes_between_layers(tmp_path, capsys) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(as_file(models.get("alexnet")))
    assert main(["plan", "placement", "--model", str(file), "--single-rate", "100"]) == 2
    error = capsys.readouterr().err
    assert "does not say what passes between its layers" in error and error.count("\n") == 1
