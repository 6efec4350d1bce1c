"""bench converge: plans, the factors of emulated time, and what trainings say, without nodes."""

from __future__ import annotations

import argparse
import json

import numpy
import pytest
import yaml
from test_inventory import OUTPUT

from bench.catalogue import models
from bench.converge import analysis, command, dataset, measure, report
from bench.converge import plan as plans
from bench.worker.protocol import LearnDone
from cluster import tuning
from cluster.core import contract
from cluster.core.errors import InfraError, UserError

CLUSTER = contract.parse(OUTPUT)
FABRICS = list(CLUSTER.fabrics)[:2]
NODES = len(CLUSTER.compute)


def load(tmp_path, **changes):
    path = tmp_path / "converge.yml"
    path.write_text(yaml.safe_dump({"fabrics": FABRICS, "nodes": [NODES], **changes}))
    plan = plans.load(path)
    plans.check(plan, CLUSTER)
    return plan


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engines": ["hogwild"]}, "plan.engines"),
        ({"engines": ["easgd"]}, "plan.large_batches"),
        ({"large_batches": [64]}, "plan.large_batches: 64 is plan.batch"),
        ({"fabrics": ["40g"]}, "plan.fabrics"),
        ({"nodes": [NODES + 1]}, "plan.nodes"),
        ({"device": "cuda"}, "plan.device"),
        ({"device": "emulated:abacus"}, "abacus"),
        ({"model": "gpt"}, "gpt"),
        ({"target": 1.5}, "plan.target"),
        ({"seeds": 0}, "plan.seeds"),
        ({"engines": ["horovod"], "moving_rate": 0.5}, "plan.moving_rate"),
        ({"learning": 1}, "plan.learning"),
    ],
)
def test_bad_plan_gives_one_line_that_names_the_field(tmp_path, changes, field):
    with pytest.raises(UserError) as caught:
        load(tmp_path, **changes)
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_large_batches_train_the_first_engine_on_the_last_fabric(tmp_path):
    plan = load(tmp_path, engines=["horovod", "easgd"], large_batches=[16, 256])
    curves = list(plans.curves(plan, CLUSTER))
    assert len(curves) == 2 * len(FABRICS) + 2
    assert {(c.engine, c.fabric) for c in curves if c.batch != plan.batch} == {("horovod", FABRICS[-1])}
    assert len({curve.id for curve in curves}) == len(curves)


def test_exchanging_the_small_network_takes_as_long_as_the_model_would(tmp_path):
    plan = load(tmp_path)
    curve = next(plans.curves(plan, CLUSTER))
    spec = measure.spec_of(plan, curve, 1)
    real_seconds = measure.small_bytes(plan) * 8 / (spec.rate_mbit * 1e6)
    modelled = models.get(plan.model).gradient_bytes * 8 / (curve.rate_gbps * 1e9)
    assert real_seconds * spec.speed == pytest.approx(modelled)
    assert spec.compute_s * spec.speed == pytest.approx(plans.compute_ms(plan, plan.batch) / 1000)


@pytest.mark.parametrize("rule", ["linear", "sqrt", "none"])
def test_learning_rate_follows_the_images_behind_an_update(tmp_path, rule):
    engines = ["horovod", "ps-async", "easgd", "local-sgd"]
    plan = load(tmp_path, scaling=rule, learning_rate=0.1, engines=engines)
    rates = {
        curve.engine: plans.learning_rate(plan, curve) for curve in plans.curves(plan, CLUSTER) if curve.batch == 64
    }
    grown = {"linear": NODES, "sqrt": NODES**0.5, "none": 1}[rule]
    assert rates["horovod"] == rates["local-sgd"] == pytest.approx(0.1 * grown)
    # A rank of easgd trains alone. The updates of all ranks of ps-async add up to a synchronous one.
    assert rates["easgd"] == pytest.approx(0.1)
    assert NODES * rates["ps-async"] == pytest.approx(rates["horovod"])


def test_accuracy_is_measured_after_an_exchange(tmp_path):
    plan = load(tmp_path, period=3)
    for curve in plans.curves(plan, CLUSTER):
        assert plans.evaluate(plan, curve) % plans.period(plan, curve.engine) == 0


def test_images_are_those_of_the_stand_in_data_set_and_test_images_are_others():
    x, y = dataset.painted(1, 40, 5)
    again, _ = dataset.painted(1, 40, 5)
    other, _ = dataset.painted(2, 40, 5)
    assert x.shape == (40, 3, dataset.PIXELS, dataset.PIXELS)
    assert set(y) <= set(range(5))
    assert numpy.array_equal(x, again)
    assert not numpy.array_equal(x, other)


def row(engine="horovod", times=(10.0, 11.0, 12.0), batch=64, samples=(1000, 1100, 1200), fabric="1g", digests="abc"):
    runs = [
        {
            **{"seed": seed, "seconds": [1.0, time or 20.0], "samples": [500, count], "accuracy": [0.1, 0.9]},
            **{"reached_s": time, "reached_samples": count if time else None, "steps": 10, "step_ms": 100.0},
            **{"staleness": {"0": 1, "4": 1} if engine == "ps-async" else {}, "overrun": 0.0, "proved": True},
            **{"sent_bytes": 1e5, "expected_bytes": 1e5, "digest": digest},
        }
        for seed, time, count, digest in zip((1, 2, 3), times, samples, digests, strict=True)
    ]
    fixed = {"nodes": 4, "scale": 350.0, "speed": 7.0, "learning_rate": 0.1, "period": 1, "predicted_step_ms": 100.0}
    return {"engine": engine, "fabric": fabric, "batch": batch, **fixed, "runs": runs}


def test_a_method_is_faster_only_if_the_interval_of_paired_seeds_says_so():
    base = row()
    faster = row("easgd", (5.0, 5.6, 6.0))
    unclear = row("local-sgd", (9.0, 13.0, 11.0))
    slower = row("ps", (20.0, 22.5, 24.0))
    (said,) = analysis.faster([base, faster, unclear, slower], 64)
    assert "Elastic Averaging SGD is faster" in said
    assert "local SGD cannot be told from it" in said
    assert "parameter server is slower" in said
    assert analysis.fastest([base, faster, unclear, slower], 64)[0].startswith("1g, 4 nodes: Elastic Averaging SGD")


def test_a_training_that_missed_the_target_is_no_win():
    missed = row("ps-async", (1.0, 1.0, None))
    (said,) = analysis.faster([row(), missed], 64)
    assert "parameter server, asynchronous missed the target in 1 of 3" in said
    assert "Horovod" in analysis.fastest([row(), missed], 64)[0]


def test_large_batches_are_compared_by_samples_with_the_smallest():
    rows = [row(batch=64, samples=(1000, 1100, 1200)), row(batch=256, samples=(2000, 2200, 2400))]
    rows.append(row(batch=1024, times=(None, None, None)))
    (said,) = analysis.large_batches(rows)
    assert "1024 images: 2 (2 to 2) times as many" in said
    assert "4096 images: target missed in 3 of 3" in said


def test_interval_of_one_seed_is_not_invented():
    assert analysis.estimate([3.0]).low is None
    three = analysis.estimate([1.0, 2.0, 4.0])
    assert three.value == pytest.approx(2.0)
    assert three.low < 1 < 4 < three.high


def test_bit_for_bit_is_said_only_where_it_is_so():
    same = analysis.same_results([row(), row(fabric="10g")])
    assert "3 of 3 seeds" in same[0]
    assert "2 of 3 seeds" in analysis.same_results([row(), row(fabric="10g", digests="abx")])[0]


def test_report_says_emulated_in_page_table_and_plots():
    plan = plans.Plan()
    rows = [row(), row("ps-async")]
    result = {"plan": plan.model_dump(), "curves": rows, "answers": analysis.answers(rows, 64)}
    text = report.markdown_page(result)
    assert "EMULATED time" in text and "emulated time" in text.split("All curves")[1]
    assert "2.0, 4" in text
    for chart in report.charts(result).values():
        drawn = chart.to_json()
        assert "EMULATED" in drawn or "staleness" in drawn


def test_volume_of_a_training_is_compared_with_what_its_engine_needs(tmp_path):
    plan = load(tmp_path, engines=["easgd"], large_batches=[], period=4)
    curve = next(plans.curves(plan, CLUSTER))
    spec = measure.spec_of(plan, curve, 1)
    elements = measure.small_bytes(plan) // 4
    share = 2 * (NODES - 1) / NODES / 4
    sender = measure.Sender("easgd", tuning.UNTUNED)
    expected = measure.expected_bytes(curve, sender, spec, elements)
    assert expected == pytest.approx(4 * elements * share, rel=0.06)
    sent = {name: {"eth": expected} for name in CLUSTER.compute}
    done = LearnDone(spec.id, [1.0], [100], [0.9], 10, elements, sent, {}, 0.0, "x")
    assert measure.training(plan, curve, sender, spec, done, "eth")["proved"]
    assert not measure.training(plan, curve, sender, spec, done, "other")["proved"]


def test_a_step_far_from_the_predicted_one_is_a_problem(tmp_path):
    assert analysis.problems([row()]) == []
    (said,) = analysis.problems([row() | {"predicted_step_ms": 60.0}])
    assert "a step took 100 ms, predicted are 60" in said
    plan = load(tmp_path, engines=["horovod", "easgd"])
    predicted = {curve.engine: measure.predicted_step_ms(plan, curve) for curve in plans.curves(plan, CLUSTER)}
    assert all(step >= plans.compute_ms(plan, plan.batch) for step in predicted.values())


def test_what_was_measured_before_a_failure_is_saved_and_said_to_be_incomplete(tmp_path, monkeypatch, capsys):
    """A launch fails after an hour of others."""
    plan = load(tmp_path, engines=["horovod", "easgd"])

    def fails(*_):
        yield [row()]
        raise InfraError("node w1 is lost")

    monkeypatch.setattr(measure, "measure", fails)
    monkeypatch.setattr(command.store, "RESULTS", tmp_path)
    monkeypatch.setattr(command.lock, "MACHINE", tmp_path / "lock")
    monkeypatch.setattr(command.tuning, "load", lambda env: {})
    with pytest.raises(InfraError):
        command.measured(argparse.Namespace(env="x", json=False), plan, CLUSTER)
    (folder,) = (tmp_path / "x/converge").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert len(result["curves"]) == 1
    assert "ended early: 1 of" in result["answers"]["problems"][0]
    assert "ended early" in (folder / "report.md").read_text()
    assert (folder / "report.html").exists()


def test_batch_without_a_compute_time_is_refused_before_anything_runs(tmp_path, monkeypatch):
    def known(profile, model, batch):
        if batch == 128:
            raise UserError("batch 128 is not known")
        return 100.0, "x"

    monkeypatch.setattr(plans.gpu_rates, "compute_ms", known)
    with pytest.raises(UserError, match="batch 128"):
        load(tmp_path, large_batches=[128])
