"""Engines that exchange weights: plans, bytes, records and pace. tests/long/test_asynchronous.py trains with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from test_node_link import S_PER_BYTE, Instant, Tensor
from test_sweep import CLUSTER, load, point_of, recorded, report

from bench.catalogue import models
from bench.plan import unfold
from bench.predict import calibrate
from bench.predict.inputs import DEFAULTS, Setup
from bench.predict.simulate import simulate
from bench.sweep import record, spec, transport
from bench.worker import node_link, pacing, placement, step_statistics
from bench.worker.protocol import Step
from cluster import tuning
from cluster.core.errors import UserError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engines": ["hogwild"], "gpus_per_node": 2}, "plan.engines: hogwild shares the memory of one node, not of 2"),
        ({"engines": ["hogwild"], "nodes": [1]}, "plan.engines: hogwild needs several ranks"),
        ({"engines": ["easgd"], "compressions": ["fp16"]}, "plan.compressions: engine easgd exchanges weights"),
        ({"engines": ["ps-async"], "compressions": ["none", "1bit"]}, "plan.compressions: engine ps-async"),
        ({"engines": ["local-sgd"], "period": 0}, "plan.period"),
        ({"engines": ["easgd"], "moving_rate": 1.5}, "plan.moving_rate"),
        ({"engines": ["local-sgd"], "moving_rate": 0.5}, "plan.moving_rate: only engine easgd has one"),
        ({"engines": ["ddp", "easgd"], "launcher": "torchrun"}, "plan.launcher"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path, changes, words):
    with pytest.raises(UserError) as caught:
        load(tmp_path, **changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def trial_of(tmp_path, engine, **changes):
    plan = load(tmp_path, engines=[engine], **changes)
    *_, group = unfold.points(plan, CLUSTER)
    point = group.points[-1]
    return plan, point, spec.trial_spec(plan, point, True, spec.Scaling(4.0, 1.0), False)


def test_period_and_moving_rate_reach_the_engines_that_have_them(tmp_path):
    assert trial_of(tmp_path, "ps-async", period=8)[2].period == 1
    assert trial_of(tmp_path, "local-sgd", period=8)[2].period == 8
    plan, point, elastic = trial_of(tmp_path, "easgd", period=8)
    # 0.9 over all ranks, as its authors use.
    assert (elastic.period, elastic.moving_rate) == (8, 0.45)
    assert trial_of(tmp_path, "easgd", moving_rate=0.1)[2].moving_rate == 0.1
    settings = spec.settings_of(plan, point, tuning.Tuning())
    assert settings.training == {"period": 8, "moving_rate": 0.45}


@pytest.mark.parametrize(
    ("engine", "algorithm", "period", "share"),
    [
        ("ps-async", "parameter_server", 1, 1.5),
        ("easgd", "parameter_server", 4, 1.5 / 4),
        ("local-sgd", "ring", 2, 0.75),
    ],
)
def test_a_node_sends_the_bytes_of_an_exchange_in_every_period(engine, algorithm, period, share):
    point = point_of(4).model_copy(update={"engine": engine})
    how = transport.algorithm(point, tuning.UNTUNED)
    assert how == algorithm
    expected = share * models.get(point.model).gradient_bytes
    assert transport.payload(point, 1, {how: 1.0}, period) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("period", [1, 3])
def test_the_proof_expects_the_bytes_of_the_period(period):
    point, main = report(["head", "w1"])
    point = point.model_copy(update={"engine": "local-sgd"})
    assert transport.proof(point, replace(main, period=period), None, "fabric0")[1] is None or period > 1
    third = [replace(one, sent={nic: sent / period for nic, sent in one.sent.items()}) for one in main.ranks]
    assert transport.proof(point, replace(main, period=period, ranks=third), None, "fabric0")[1] is None


def test_a_step_is_the_mean_of_a_period_and_a_fast_rank_counts_its_own_speed():
    point, main = report(["head", "w1"])
    point = point.model_copy(update={"engine": "easgd"})
    cheap, dear = Step(0.1, 0.1, 0.0, 0.0), Step(0.3, 0.1, 0.2, 0.0)
    ranks = [
        replace(main.ranks[0], steps=[cheap, dear] * 6, staleness={"0": 3, "2": 1}),
        replace(main.ranks[1], steps=[Step(0.4, 0.4, 0.0, 0.0)] * 12, staleness={"1": 4}),
    ]
    ranks = [replace(one, sent={nic: sent / 2 for nic, sent in one.sent.items()}) for one in ranks]
    main = replace(main, ranks=ranks, period=2)
    trial = record.trial(
        *(point, main, None, (164.0, "a table"), "fabric0", 1.0, "2026-01-01T00:00:00+00:00"),
        algorithm="parameter_server",
        moving_rate=0.45,
    )
    assert trial.status == "ok", trial.error
    # Rank 0 does a step in 0.2 s and rank 1 in 0.4 s: together 7.5 steps per second.
    assert trial.images_per_second.median == pytest.approx(7.5 * point.batch)
    assert trial.breakdown_ms.straggler_wait == 0
    assert trial.steps == 12
    assert (trial.weights.period, trial.weights.moving_rate) == (2, 0.45)
    found = trial.weights.staleness
    assert (found.mean, found.median, found.largest, found.updates) == (0.75, 1.0, 2, 8)


def test_engines_with_a_barrier_record_no_weights():
    assert recorded(*report(["head", "w1"])).weights is None


def test_staleness_of_no_update_is_none():
    assert record.staleness(Counter()) is None
    assert record.staleness(Counter({5: 1})).p95 == 5


def test_no_decision_falls_between_two_exchanges():
    pace = pacing.of(False, asynchronous=True, period=5)
    assert pace.steps([]) % 5 == pace.steps([0.2]) % 5 == pace.steps([9.0]) % 5 == 0
    # Synchronous trials keep their pace.
    assert [pacing.of(False).steps(times) for times in ([], [0.2])] == [2, 2]


def test_windows_leave_out_what_is_not_whole():
    assert step_statistics.windows([1.0, 3.0, 5.0, 7.0, 100.0], 2) == [2.0, 6.0]


def test_every_tensor_is_in_one_block_of_its_owner():
    sizes = {f"t{number}": size for number, size in enumerate([7, 1, 1, 1, 4, 2, 9])}
    found = placement.blocks(sizes, 3, limit=16)
    assert sorted(name for block in found for name in block.names) == sorted(sizes)
    owner_of = dict(zip(sizes, placement.owners(list(sizes.values()), 3), strict=True))
    for block in found:
        assert {owner_of[name] for name in block.names} == {block.owner}
        assert block.elements == sum(sizes[name] for name in block.names)
    # Whole tensors: the owner of a large one serves more than its share.
    assert placement.owners([10, 1, 1, 1], 2) == [0, 1, 1, 1]


def test_weights_cross_the_link_of_a_node_after_the_step_and_only_when_they_are_exchanged(monkeypatch):
    moments = []
    monkeypatch.setattr(node_link, "sleep_until", moments.append)
    monkeypatch.setattr(node_link.time, "perf_counter", lambda: 100.0)

    class Weights(Instant):
        holds_weights, exchanges_next = True, False

    engine = Weights()
    link = node_link.wrap(engine, S_PER_BYTE)
    for due, end in ((False, 0.0), (True, 100.03)):
        engine.exchanges_next = due
        link.begin(1.0)
        link.submit("a", Tensor(30_000))
        link.wait()
        assert moments[-1] == pytest.approx(end)


def step_of(engine: str, nodes: int = 4, rate: float = 1.0, model: str = "resnet50", period: int = 4):
    placement_of = "nodes" if engine == "ps" else "even"
    setup = Setup(model, 64, 300.0, nodes, 1, rate, engine=engine, placement=placement_of, period=period)
    return simulate(setup, DEFAULTS)


def test_prediction_of_an_exchange_follows_its_bytes():
    # Three flows into one port.
    seconds = models.get("resnet50").gradient_bytes * 8 / 0.96e9 * (1 + DEFAULTS.incast * 2 / 3)
    for engine in ("ps", "ps-async"):
        # 2 (n - 1) / n of the bytes, of which forward hides nothing and backward all it can.
        lost = 1 + DEFAULTS.server_wait if engine == "ps" else 1
        assert step_of(engine).total == pytest.approx(100 + 1.5 * lost * seconds * 1000, rel=0.06)
    # A quarter of it in each step, after backward.
    assert step_of("easgd").total == pytest.approx(300 + 1.5 * seconds * 1000 / 4, rel=0.06)
    assert step_of("easgd", period=1).exposed == pytest.approx(4 * step_of("easgd").exposed)
    assert step_of("local-sgd", period=1).exposed == pytest.approx(4 * step_of("local-sgd").exposed, rel=0.01)


def test_prediction_of_one_node_is_its_compute_and_nobody_waits_for_the_slowest():
    for engine in ("ps-async", "easgd", "local-sgd"):
        assert step_of(engine, nodes=1).total == 300.0
    assert step_of("ps-async", rate=100.0).straggler == step_of("easgd").straggler == 0
    assert 0 < step_of("local-sgd").straggler < step_of("ps").straggler


def test_the_owner_of_a_large_tensor_is_the_slowest_port():
    """VGG-16: one layer has three quarters of the weights, and its owner sends them to all others."""
    seconds = models.get("vgg16").gradient_bytes * 8 / 0.96e9
    assert step_of("ps-async", model="vgg16").total > 1.3 * (100 + 1.5 * seconds * 1000)


def test_a_run_of_an_engine_without_a_barrier_calibrates_with_its_period():
    point, main = report(["head", "w1"])
    point = point.model_copy(update={"engine": "easgd", "batch": 64})
    trial = record.trial(
        *(point, replace(main, period=2), None, (164.0, "a table"), "fabric0", 1.0, "2026-01-01T00:00:00+00:00"),
        algorithm="parameter_server",
    )
    series = calibrate._series(trial)
    setup = calibrate._setup(series, 2, 164.0)
    assert (setup.engine, setup.period) == ("easgd", 2)
