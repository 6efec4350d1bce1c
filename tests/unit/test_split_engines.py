"""Networks that are split over nodes: what each rank does in a step, the bytes it proves, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict

import pytest
import yaml
from test_inventory import OUTPUT

from bench.catalogue import models, units
from bench.plan import check, programs, schema, split_engines, stages, unfold
from bench.predict import split
from bench.predict.inputs import DEFAULTS, Setup
from bench.results.trial import Point
from bench.sweep import spec, transport
from bench.worker.protocol import Operation, Spec, decode
from cluster.core import contract
from cluster.core.errors import UserError
from cluster.tuning import Tuning

CLUSTER = contract.parse(OUTPUT)


def load(tmp_path, **changes) -> schema.Plan:
    path = tmp_path / "plan.yml"
    values = {"nodes": [3], "batches": [32], "fabrics": ["1g"], "models": ["vgg16"], **changes}
    path.write_text(yaml.safe_dump(values))
    plan = schema.load(str(path))
    check.check(plan, CLUSTER, available=10)
    return plan


def points(plan: schema.Plan) -> list[Point]:
    return [point for group in unfold.points(plan, CLUSTER) for point in group.points]


def built(tmp_path, engine: str, model: str, nodes: int, **changes):
    plan = load(tmp_path, engines=[engine], models=[model], nodes=[nodes], **changes)
    (point,) = points(plan)
    found = split_engines.spec(plan, point)
    assert found is not None
    return plan, point, found


CASES = [
    *(("fsdp", model, 3) for model in ("resnet50", "vgg16", "inceptionv3")),
    *(("pipeline", model, nodes) for model, nodes in (("resnet50", 4), ("vgg16", 3), ("inceptionv3", 5))),
    *(("tensor", model, 3) for model in ("vgg16", "alexnet")),
    *(("spatial", model, nodes) for model, nodes in (("resnet50", 3), ("vgg16", 4), ("alexnet", 2))),
]


@pytest.mark.parametrize(("engine", "model", "nodes"), CASES)
def test_every_rank_computes_its_share_and_every_message_has_a_receiver(tmp_path, engine, model, nodes):
    plan, point, found = built(tmp_path, engine, model, nodes)
    assert len(found.programs) == nodes
    whole = unfold.compute_ms(plan, point)[0]
    sent: Counter[tuple[int, int, float]] = Counter()
    received: Counter[tuple[int, int, float]] = Counter()
    for rank, program in enumerate(found.programs):
        started = 0
        for one in program:
            if one.kind == "wait":
                assert one.at < started, "waits for a collective that was not started"
            started += one.kind in ("gather", "scatter", "sum")
            sent[rank, one.at, one.value] += one.kind == "send"
            received[one.at, rank, one.value] += one.kind == "receive"
        assert program[-1].kind == "finish"
        compute = sum(one.value for one in program if one.kind == "compute")
        if engine in ("fsdp", "tensor"):
            assert compute == pytest.approx(whole)
        if engine == "spatial":
            assert whole <= compute < 1.2 * whole
    assert +sent == +received
    # All ranks start the same collectives in the same order, or they would wait for each other for ever.
    order = [[(one.kind, one.value) for one in p if one.kind in ("gather", "scatter", "sum")] for p in found.programs]
    assert engine == "pipeline" or all(one == order[0] for one in order)


@pytest.mark.parametrize(("engine", "model", "nodes"), CASES)
def test_the_bytes_that_a_trial_must_prove_are_those_that_are_predicted(tmp_path, engine, model, nodes):
    plan, point, _ = built(tmp_path, engine, model, nodes)
    setup = Setup(model, 32, unfold.compute_ms(plan, point)[0], nodes, 1, 1.0, gpu="p100", compute_doubt=0.08)
    options = {"depth": nodes} if engine == "pipeline" else {}
    predicted = getattr(split, engine)(setup, DEFAULTS, **options)
    assert split_engines.node_bytes(plan, point) == pytest.approx(predicted.sent_bytes, rel=0.03)


def test_transformers_sum_activations_four_times_per_block(tmp_path):
    plan, point, found = built(tmp_path, "tensor", "bert-base", 4, compute_ms=500)
    state = 768 * 128 * 32 * 4
    sums = [one.value for one in found.programs[0] if one.kind == "sum"]
    assert sums == [state] * (4 * 12 + 2)
    assert split_engines.node_bytes(plan, point) == pytest.approx(4 * 2 * 3 / 4 * sum(sums))
    setup = Setup("bert-base", 32, 500.0, 4, 1, 1.0)
    assert split.tensor(setup, DEFAULTS).sent_bytes == pytest.approx(4 * 1.5 * sum(sums))


def test_sharded_weights_are_sent_three_times_over_n_and_gradients_two_times(tmp_path):
    plan, point, _ = built(tmp_path, "fsdp", "resnet50", 4)
    parameters = models.get("resnet50").parameters
    last = units.of("resnet50")[-1].parameters
    # The last unit is still there when backward begins with it.
    assert split_engines.node_bytes(plan, point) == pytest.approx(4 * 3 / 4 * (3 * parameters - last))
    assert transport.payload(
        point, 10.0, {"fsdp": 1.0}, split_bytes=split_engines.node_bytes(plan, point)
    ) == pytest.approx(0.4 * 3 / 4 * (3 * parameters - last))
    assert transport.algorithm(point, Tuning()) == "fsdp"


def test_on_cpus_the_bytes_are_those_of_torch_over_gloo(tmp_path):
    # Measured with AlexNet on three ranks: 1959.4 MB, 107.2 MB and 3.7 MB per step with headers, all ranks together.
    for engine, megabytes in (("fsdp", 1959.4), ("tensor", 107.2), ("pipeline", 3.68)):
        plan, point, _ = built(tmp_path, engine, "alexnet", 3, device="cpu", batches=[2])
        assert 3 * split_engines.node_bytes(plan, point) / 1e6 == pytest.approx(megabytes, rel=0.02)


def test_a_pipeline_is_cut_as_bench_plan_placement_cuts(tmp_path):
    plan, point, found = built(tmp_path, "pipeline", "vgg16", 4, micro_batches=8, schedule="gpipe")
    setup = Setup("vgg16", 32, unfold.compute_ms(plan, point)[0], 4, 1, 1.0, gpu="p100", compute_doubt=0.08)
    planned = split.pipeline(setup, DEFAULTS, count=8, schedule="gpipe")
    assert found.stages == [stage.first for stage in planned.cut]
    assert split_engines.settings(plan, point) == {"stages": 4, "micro_batches": 8, "schedule": "gpipe"}
    for rank, program in enumerate(found.programs):
        kinds = [one.kind for one in program if one.kind != "finish"]
        assert kinds.count("compute") == 2 * 8
        assert kinds.count("send") == kinds.count("receive") == 8 * ((rank > 0) + (rank < 3))


def test_replicas_of_a_pipeline_add_up_per_stage(tmp_path):
    _, point, found = built(tmp_path, "pipeline", "vgg16", 6, stages=3)
    assert len(found.stages) == 3 and point.gpus == 6
    assert found.groups[1:4] == [[0, 3], [1, 4], [2, 5]]
    for rank, program in enumerate(found.programs):
        (total,) = [one for one in program if one.kind == "sum"]
        assert rank in found.groups[total.at] and len(found.groups[total.at]) == 2
    cut = stages.cut("vgg16", 3)
    assert sum(stage.parameters for stage in cut) == models.get("vgg16").parameters
    peers = {(rank, one.at) for rank, program in enumerate(found.programs) for one in program if one.kind == "send"}
    assert all(rank // 3 == peer // 3 for rank, peer in peers)


def test_the_spec_reaches_the_worker_whole(tmp_path):
    plan = load(tmp_path, engines=["spatial", "ddp"])
    group, other = unfold.points(plan, CLUSTER)
    launches = [spec.launch_spec(plan, one, True, spec.Scaling(4.0), check=True) for one in (group, other)]
    again = decode(Spec, json.loads(Spec(launches).encode()))
    assert again.launches == launches
    assert isinstance(again.launches[0].trials[0].split.programs[0][0], Operation)
    assert again.launches[1].trials[0].split is None
    assert asdict(again.launches[0].trials[1])["check"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engines": ["pipeline"], "compressions": ["1bit"]}, "engine pipeline does not support 1bit"),
        ({"engines": ["fsdp"], "compressions": ["none", "fp16"]}, "engine fsdp does not support fp16"),
        ({"engines": ["pipeline"], "models": ["alexnet"], "nodes": [9]}, "plan.nodes: 9 stages, but alexnet has 8"),
        ({"engines": ["pipeline"], "models": ["alexnet"], "stages": 9}, "plan.stages: 9 stages, but alexnet has 8"),
        ({"engines": ["pipeline"], "stages": 2}, "plan.stages: 2 stages do not divide 3 nodes"),
        ({"engines": ["pipeline"], "stages": 6}, "plan.stages: 6 stages need as many nodes, plan.nodes has 3 at most"),
        ({"engines": ["pipeline"], "micro_batches": 7}, "plan.micro_batches: 7 does not divide the 96 samples"),
        ({"engines": ["pipeline"], "micro_batches": 2}, "plan.micro_batches: 2 leave stages without work"),
        ({"engines": ["ddp"], "stages": 3}, "plan.stages: only engine pipeline has it"),
        ({"engines": ["ddp"], "schedule": "gpipe"}, "plan.schedule: only engine pipeline has it"),
        ({"engines": ["pipeline"], "schedule": "zb"}, "plan.schedule"),
        ({"engines": ["tensor"], "models": ["resnet50"]}, "tensor splits large linear layers"),
        ({"engines": ["tensor"], "models": ["gpt2"], "nodes": [5], "compute_ms": 9}, "tensor splits the 12 heads"),
        ({"engines": ["spatial"], "models": ["vit-b16"], "compute_ms": 9}, "spatial splits images into tiles, vit-b16"),
        ({"engines": ["spatial"], "nodes": [8]}, "spatial needs a row of the last image per tile, vgg16 has 7, not 8"),
        ({"engines": ["spatial"], "models": ["efficientnet-b0"], "compute_ms": 9}, "needs means of whole images"),
        ({"engines": ["fsdp"], "gpus_per_node": 2}, "plan.gpus_per_node: engine fsdp has one rank per node"),
        ({"engines": ["pipeline"], "data": "shards:/data"}, "plan.data: engine pipeline reads no shards"),
        ({"engines": ["fsdp"], "launcher": "torchrun"}, "plan.launcher: torchrun starts engine ddp only"),
    ],
)  # fmt: skip
def test_combinations_that_cannot_work_are_refused_in_one_line(tmp_path, changes, message):
    with pytest.raises(UserError) as caught:
        load(tmp_path, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gpus_are_refused(tmp_path):
    path = tmp_path / "plan.yml"
    path.write_text(yaml.safe_dump({"nodes": [1], "batches": [8], "fabrics": ["1g"], "engines": ["fsdp"]}))
    plan = schema.load(str(path)).model_copy(update={"device": "cuda"})
    with pytest.raises(UserError, match=r"plan\.engines: fsdp does not run on GPUs"):
        split_engines.check(plan)


def test_tied_networks_are_refused_for_pipelines_that_train(tmp_path):
    with pytest.raises(UserError, match=r"plan\.models: the two ends of gpt2 share weights"):
        load(tmp_path, engines=["pipeline"], models=["gpt2"], device="cpu")
    load(tmp_path, engines=["pipeline"], models=["gpt2"], compute_ms=500)


def test_large_linears_are_the_first_two_of_a_classifier():
    assert [unit.name for unit in programs.large_linears(units.of("vgg16"))] == ["classifier.0", "classifier.3"]
    assert programs.tiled(units.of("vgg16")) == 13
