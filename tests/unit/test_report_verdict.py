"""What the report concludes from the trials: limits, numbers and curves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from report_cases import ANSWERS, RUNS, copy, judged

from bench.charts import caveat
from bench.explain import verdict, whatif
from bench.report import plots
from bench.results import runs
from bench.results.points import tabulate


@pytest.mark.parametrize("name", ANSWERS)
def test_verdict_names_the_known_limit(name: str) -> None:
    assert judged(RUNS / name).limit == ANSWERS[name]["limit"]


def test_fixtures_are_what_their_script_writes(tmp_path: Path) -> None:
    code = f"import make_runs, pathlib; make_runs.RUNS = pathlib.Path({str(tmp_path)!r}); make_runs.main()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=RUNS.parent)
    written = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert len(written) > 3 * len(ANSWERS)
    for path in written:
        assert path.read_bytes() == (RUNS / path.relative_to(tmp_path)).read_bytes(), path.name


def test_every_fixture_says_that_it_is_constructed() -> None:
    for name in ANSWERS:
        run = runs.load(RUNS / name)
        assert "constructed" in run.provenance
        assert "CONSTRUCTED" in caveat(tabulate(run.trials).families[0], tabulate(run.trials).points, True)


def test_verdict_numbers_are_those_of_the_trials() -> None:
    run = runs.load(RUNS / "network-1g")
    found = verdict.judge(tabulate(run.trials))
    rate = {
        (trial.point.fabric, trial.point.nodes): trial.images_per_second.median
        for trial in run.trials
        if trial.point.batch == 64 and trial.images_per_second
    }
    assert found.numbers["nodes"] == 10
    assert found.numbers["efficiency"] == pytest.approx(rate["1g", 10] / (10 * rate["1g", 1]))
    assert found.numbers["efficiency:10g"] == pytest.approx(rate["10g", 10] / (10 * rate["10g", 1]))
    assert found.sentence.startswith("On 1G ten emulated P100 nodes train at 16% efficiency: the network is the limit")


def test_verdict_predicts_the_fabric_that_was_not_measured(tmp_path: Path) -> None:
    folder = copy("network-1g", tmp_path, lambda trial: trial["point"]["fabric"] == "1g")
    found = judged(folder)
    assert "10 Gbit/s would give" in found.sentence
    measured = judged(RUNS / "network-1g").numbers["efficiency:10g"]
    assert found.numbers["efficiency:10"] == pytest.approx(measured, abs=0.08)
    assert found.as_json()["predicted"] == ["efficiency:10", "rate_for_80"]


def test_whatif_passes_through_every_measured_fabric_of_its_transport() -> None:
    table = tabulate(runs.load(RUNS / "network-1g").trials)
    points = [p for p in table.points if (p.nodes, p.batch, p.transport) == (10, 64, "tcp")]
    assert len(points) == 2
    curve = whatif.curve_for(points[0], table)
    assert curve is not None
    for point in points:
        assert point.efficiency is not None
        assert curve.efficiency(point.rate_gbps) == pytest.approx(point.efficiency.median, rel=0.01)


def test_whatif_rate_for_is_the_rate_that_reaches_it() -> None:
    table = tabulate(runs.load(RUNS / "network-1g").trials)
    point = verdict.headline_point([point for point in table.points if point.nodes > 1])
    curve = whatif.curve_for(point, table)
    assert curve is not None
    rate = curve.rate_for(0.8)
    assert rate is not None and 1 < rate < 10
    assert curve.efficiency(rate) == pytest.approx(0.8, abs=0.01)
    assert curve.efficiency(rate * 0.9) < 0.8
    assert curve.rate_for(1.01) is None


def test_data_starved_nodes_that_scale_perfectly_are_still_called_starved() -> None:
    run = runs.load(RUNS / "data-hdd")
    found = verdict.judge(tabulate(run.trials))
    assert "reading the data is the limit" in found.sentence
    assert found.point is not None and found.point.breakdown is not None
    assert found.numbers["busy"] == pytest.approx(found.point.breakdown.compute / found.point.step_ms.median)


def test_gpu_is_called_by_the_name_the_run_gives_it(tmp_path: Path) -> None:
    folder = copy("compute-ib", tmp_path)
    provenance = json.loads((folder / "provenance.json").read_text())
    provenance["nodes"] = {name: {"gpu_model": "v100"} for name in ("head", "w1")}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    run = runs.load(folder)
    assert "eight V100 nodes" in verdict.judge(run.table()).sentence
    provenance["nodes"]["w1"]["gpu_model"] = "k80"
    (folder / "provenance.json").write_text(json.dumps(provenance))
    run = runs.load(folder)
    assert "eight GPU nodes" in verdict.judge(run.table()).sentence


def test_straggler_is_named() -> None:
    assert "w3 is the limit" in judged(RUNS / "straggler").sentence


def test_wrong_interface_is_named_even_when_the_trial_claims_to_be_ok(tmp_path: Path) -> None:
    def swap(trial: dict) -> None:
        transport = trial["traffic"]
        if transport:
            for node, sent in transport["measured_bytes"].items():
                transport["other_bytes"][node] = {"mgmt0": sent}
                transport["measured_bytes"][node] = 10.0

    found = judged(copy("straggler", tmp_path, swap))
    assert found.limit == "wrong-nic"
    assert "mgmt0 instead of fab0" in found.sentence


def test_busy_cpu_is_no_finding_where_the_cpu_is_the_device(tmp_path: Path) -> None:
    def on_cpu(trial: dict) -> None:
        trial["kind"], trial["point"]["device"], trial["host_cpu_percent"] = "cpu", "cpu", 100.0

    assert judged(copy("compute-ib", tmp_path, on_cpu)).limit == "compute"


def test_busy_cpu_is_no_finding_where_twice_the_scale_changed_nothing(tmp_path: Path) -> None:
    def poll(trial: dict) -> None:
        trial["host_cpu_percent"] = 99.5

    assert judged(copy("untuned-collective", tmp_path, poll)).limit == "collective"


def test_slow_link_is_told_from_a_slow_collective(tmp_path: Path) -> None:
    def half(trial: dict) -> None:
        if trial["link_gbps"]:
            trial["link_gbps"] *= 0.42

    found = judged(copy("untuned-collective", tmp_path, half))
    assert found.limit == "link"
    assert "delivers only 0.4 of 1 Gbit/s" in found.sentence


def test_repeats_are_merged_and_their_interval_covers_all() -> None:
    table = tabulate(runs.load(RUNS / "compute-ib").trials)
    point = table.points[-1]
    assert len(point.trials) == 2
    for trial in point.trials:
        assert trial.images_per_second is not None
        assert point.ips.low <= trial.images_per_second.low <= trial.images_per_second.high <= point.ips.high


def test_kinds_never_share_a_curve(tmp_path: Path) -> None:
    folder = copy("engines", tmp_path)
    other = copy("straggler", tmp_path)
    with (folder / "trials.jsonl").open("a") as file:
        file.write((other / "trials.jsonl").read_text())
    table = tabulate(runs.load(folder).trials)
    assert {family.kind for family in table.families} == {"emulated", "cuda"}
    for family in table.families:
        for name, chart in plots.charts_for(table, family).items():
            (shown,) = chart.to_dict()["datasets"].values()
            scales = {line["scale"] is None for line in shown}
            assert len(scales) == 1, name


def test_efficiency_without_a_one_node_point_says_what_it_is_against(tmp_path: Path) -> None:
    folder = copy("network-1g", tmp_path, lambda trial: trial["point"]["nodes"] > 1)
    run = runs.load(folder)
    table = tabulate(run.trials)
    assert any("against compute time alone" in text for text in verdict.missing(run, table))
    whole = tabulate(runs.load(RUNS / "network-1g").trials)
    for point, other in zip(table.points, (p for p in whole.points if p.nodes > 1), strict=True):
        assert point.efficiency is not None and other.efficiency is not None
        assert point.efficiency.median == pytest.approx(other.efficiency.median, rel=0.02)


def test_strong_scaling_follows_the_total_batch(tmp_path: Path) -> None:
    """512 images per step in all: each node count has another batch per GPU, and all are one curve."""

    def shrink(trial: dict) -> None:
        nodes = trial["point"]["nodes"]
        trial["point"]["batch"] = 512 // nodes
        for name, value in (("median", 100.0), ("low", 99.0), ("high", 101.0)):
            trial["images_per_second"][name] = value * nodes**0.5

    folder = copy("straggler", tmp_path, shrink)
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"scaling": "strong"}))
    table = runs.load(folder).table()
    assert [point.group for point in table.points] == [512] * 4
    for point in table.points:
        assert point.efficiency is not None
        assert point.efficiency.median == pytest.approx(point.nodes**-0.5)
    chart = plots.charts_for(table, table.families[0])["throughput"].to_dict()
    assert "total batch" in json.dumps(chart)
