"""Real data in a sweep: fields of the plan, record of the trial, report and explanation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from report_cases import copy

from bench.explain import verdict
from bench.explain.command import explain_run
from bench.plan import check, schema, unfold
from bench.results.runs import load
from bench.results.trial import Point
from bench.sweep import record, transport
from bench.sweep.spec import input_spec
from bench.worker.protocol import InputReport, RankReport, Step
from cluster.core.errors import UserError

URL = "shards:http://head:8880/set"
POINT = Point(
    fabric="1g",
    rate_gbps=1,
    nodes=2,
    gpus_per_node=1,
    batch=32,
    model="resnet50",
    engine="horovod-mpi",
    device="emulated:p100",
    data=URL,
)


def write_plan(folder, **more):
    path = folder / "p.yml"
    path.write_text(yaml.safe_dump({"nodes": [2], "batches": [32], "fabrics": ["1g"], **more}))
    return str(path)


def test_plan_takes_one_data_source_or_several(tmp_path):
    assert schema.load(write_plan(tmp_path)).data == ["synthetic"]
    assert schema.load(write_plan(tmp_path, data=URL)).data == [URL]
    both = schema.load(write_plan(tmp_path, data=["synthetic", URL]))
    points = [point for one in unfold.points(both, None) for point in one.points]
    assert [point.data for point in points] == ["synthetic", URL]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"data": "imagenet"}, "shards:http://head:8880/name"),
        ({"data": "shards:relative/folder"}, "shards:/folder/on/every/node"),
        ({"data": ["synthetic", "synthetic"]}, "duplicate"),
        ({"data_cores": 0}, "data_cores"),
    ],
)
def test_bad_data_gives_a_message_with_the_fix(tmp_path, more, message):
    with pytest.raises(UserError, match=message):
        schema.load(write_plan(tmp_path, **more))


def test_dali_needs_a_gpu(tmp_path):
    plan = schema.load(write_plan(tmp_path, data=URL, data_loader="dali"))
    with pytest.raises(UserError, match="dali needs device cuda"):
        check.check(plan, None, 2)


def test_reading_over_the_fabric_is_scaled_with_it(tmp_path):
    plan = schema.load(write_plan(tmp_path, data_cores=3))
    assert input_spec(plan, POINT, 8.2).reused == 8
    assert input_spec(plan, POINT, 1.0).reused == 1
    assert input_spec(plan, POINT.model_copy(update={"data": "shards:/disk/set"}), 8.2).reused == 1
    assert input_spec(plan, POINT, 8.2).cores == 3
    assert input_spec(plan, POINT.model_copy(update={"data": "synthetic"}), 8.2) is None


def rank(node, wait, read):
    steps = [Step(0.2 + wait + 0.1, 0.2, 0.2, wait)] * 8
    given = InputReport(1, 4, 2.0, read, 0.5, 900, 1.8, {"not an image": 2}, ["a"])
    return RankReport(node, 0, steps, {"fabric0": 0.0}, given)


def test_data_wait_is_a_separate_part_of_a_step():
    """The rank with the longest wait delays all ranks; the parts still add up."""
    ranks = [replace(rank("head", 0.0, 8e6), steps=[Step(0.6, 0.2, 0.5, 0.0)] * 8), rank("w1", 0.3, 8e6)]
    parts = record.breakdown(ranks)
    assert parts.data_wait == pytest.approx(300)
    assert parts.compute == pytest.approx(200)
    assert parts.compute + parts.data_wait + parts.exposed_comm + parts.straggler_wait == pytest.approx(600)


def test_shards_from_the_head_count_as_expected_traffic():
    ranks = [rank("head", 0.0, 99e6), rank("w1", 0.0, 8e6)]
    # w1 read 8 MB in 8 steps: 0.5 MB per node and step. The head reads locally.
    assert transport.served_bytes(POINT, ranks) == pytest.approx(0.5e6)
    assert transport.served_bytes(POINT.model_copy(update={"data": "shards:/disk"}), ranks) == 0
    assert transport.served_bytes(POINT.model_copy(update={"data": "shards:http://elsewhere/x"}), ranks) == 0


def test_trial_records_the_capacity_of_the_input_pipeline():
    ranks = [rank("head", 0.0, 8e6), rank("w1", 0.3, 8e6)]
    found = record.pipeline(ranks)
    assert found.decode_busy == pytest.approx(0.9)
    assert found.decode_images_per_second == pytest.approx(1000)
    assert found.read_mb_per_second == pytest.approx(32)
    assert found.skipped == {"not an image": 4}
    assert record.pipeline([replace(rank("w1", 0, 0), input=None)]) is None


def with_input(busy):
    def change(trial):
        rate = trial["images_per_second"]["median"]
        trial["input"] = {
            "cores": 1,
            "decode_busy": busy,
            "decode_images_per_second": rate / max(busy, 0.01),
            "read_mb_per_second": 500.0,
            "skipped": {"not an image": 3},
        }

    return change


def test_busy_decoders_make_decoding_the_limit(tmp_path):
    folder = copy("decode-cpu", tmp_path, with_input(0.97))
    (folder / "capacities.json").unlink()
    found = explain_run(load(folder))
    assert found["limit"] == "decode"
    assert found["weakest"]["stages"] == ["decode"]
    assert "one core per GPU 97% busy" in found["reason"]
    assert next(stage for stage in found["path"] if stage["stage"] == "decode")["source"] == "measured"


def test_idle_decoders_make_storage_the_limit(tmp_path):
    folder = copy("decode-cpu", tmp_path, with_input(0.2))
    (folder / "capacities.json").unlink()
    found = explain_run(load(folder))
    assert found["limit"] == "storage"


def test_report_compares_real_data_with_synthetic(tmp_path):
    folder = copy("decode-cpu", tmp_path, with_input(0.97))
    lines = (folder / "trials.jsonl").read_text().splitlines()
    for line in list(lines):
        trial = json.loads(line)
        trial["point"]["data"] = "synthetic"
        trial["id"] = f"ff{trial['id'][2:]}"
        trial["input"] = None
        for name in ("low", "median", "high"):
            trial["images_per_second"][name] *= 2
            trial["step_ms"][name] /= 2
        lines.append(json.dumps(trial))
    (folder / "trials.jsonl").write_text("\n".join(lines) + "\n")
    run = load(folder)
    found = verdict.real_data(run.table())
    assert "(50%)" in found[0]
    assert "wait for images" in found[0]
    assert "not an image" in found[-1]
