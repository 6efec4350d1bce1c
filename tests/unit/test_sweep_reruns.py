"""What a sweep measures once, what it measures again, and what a trial that failed shows."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from report_cases import copy
from rich.console import Console
from test_sweep import CLUSTER, load, recorded, report

from bench.cli import main
from bench.plan import check, schema, unfold
from bench.results import runs, store
from bench.results.trial import Trial
from bench.sweep import executors, runner, summary
from cluster.core.errors import InfraError, UserError
from cluster.tuning import Tuning


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    for module in (runner, summary):
        monkeypatch.setattr(module, "console", Console(file=out, width=200))
    return out


def sweep(plan, folder: Path, tuned: dict[str, Tuning] | None = None) -> runner.Sweep:
    return runner.Sweep(plan, store.RunFolder(folder), executors.SshExecutor(CLUSTER), tuned or {}, None, check=True)


def measure(run: runner.Sweep) -> None:
    """Put a trial into the run for each of its points, as the sweep would."""
    for group in run.groups:
        scaling = runner.spec.scaling_of(run.plan, group, run.shaped(group.fabric))
        for point in group.points:
            _, event = report(["head", "w1"])
            compute = unfold.compute_ms(run.plan, point)
            trial = runner.record.trial(point, event, None, compute, "fabric0", 1.0, "2026-01-01T00:00:00+00:00")
            emulation = trial.emulation.model_copy(update={"scale": scaling.scale, "slowdown": scaling.slowdown})
            given = {"settings": run.settings(point), "status": "ok", "error": None, "emulation": emulation}
            run.folder.append(trial.model_copy(update=given))


def test_one_engine_under_two_names_is_measured_once(tmp_path: Path) -> None:
    plan = load(tmp_path, engines=["horovod", "horovod-gloo", "horovod-mpi"])
    groups = list(unfold.points(plan, CLUSTER))
    points = [point for group in groups for point in group.points]
    assert len(points) == len({point.id for point in points}) == 4
    assert [group.engine for group in groups] == ["horovod-gloo"] * 2 + ["horovod-mpi"] * 2


def test_batches_that_strong_scaling_rounds_to_the_same_are_measured_once(tmp_path: Path) -> None:
    plan = load(tmp_path, nodes=[8], batches=[63, 64, 65], scaling="strong")
    (group,) = unfold.points(plan, CLUSTER)
    assert [point.batch for point in group.points] == [8]


def test_link_of_a_plan_cannot_take_the_name_of_a_fabric(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^plan\.links\.1g: the cluster has a fabric of this name"):
        load(tmp_path, links={"1g": {"rate_gbps": 40}})


@pytest.mark.parametrize(
    ("tuned", "text"),
    [({}, None), ({"1g": Tuning(fusion_mb=64)}, "tuning.fusion_mb 128 then 64"), ({"10g": Tuning(fusion_mb=64)}, None)],
    ids=["same", "tuned", "another fabric tuned"],
)
def test_trials_measured_under_other_tuned_settings_are_measured_again(
    tmp_path: Path, screen: io.StringIO, tuned: dict[str, Tuning], text: str | None
) -> None:
    plan = load(tmp_path, batches=[32, 64])
    measure(sweep(plan, tmp_path))
    again = sweep(plan, tmp_path, tuned)
    assert len(again.done()) == (4 if text is None else 0)
    assert (text or "") in screen.getvalue()
    assert ("measuring them again" in screen.getvalue()) == (text is not None)


@pytest.mark.parametrize("changes", [{"compute_ms": 50}, {"slowdown": 4}, {"seconds": 5}])
def test_trials_measured_under_other_settings_of_the_plan_are_measured_again(
    tmp_path: Path, screen: io.StringIO, changes: dict[str, float]
) -> None:
    measure(sweep(load(tmp_path, nodes=[2]), tmp_path))
    again = sweep(load(tmp_path, nodes=[2], **changes), tmp_path)
    assert again.done() == set()
    assert f"1 trials were measured under other settings ({next(iter(changes))}" in screen.getvalue()


def test_trials_of_earlier_versions_are_kept_and_said_to_record_no_settings(
    tmp_path: Path, screen: io.StringIO
) -> None:
    run = sweep(load(tmp_path), tmp_path)
    measure(run)
    lines = [json.loads(line) for line in run.folder.trials_file.read_text().splitlines()]
    for line in lines:
        del line["settings"]
    run.folder.trials_file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert len(run.done()) == 2
    assert "2 trials of an earlier version do not record their settings" in screen.getvalue()


def test_report_says_that_trials_of_a_curve_were_measured_under_different_settings(tmp_path: Path, capsys) -> None:
    plan = load(tmp_path, nodes=[1, 2])
    measure(sweep(plan, tmp_path))
    measure(sweep(plan.model_copy(update={"nodes": [2]}), tmp_path, {"1g": Tuning(cycle_ms=7)}))
    assert main(["report", str(tmp_path)]) == 0
    changed = "were measured under different settings (tuning.cycle_ms 2 then 7)"
    assert f"resnet50, horovod-gloo, none, synthetic on 1g {changed}" in (tmp_path / "report.html").read_text()


def test_failed_trial_has_no_figures_and_the_table_says_failed(tmp_path: Path, screen: io.StringIO) -> None:
    point, main_event = report(["head", "w1"], share=1.4)
    _, check = report(["head", "w1"], share=0.7)
    trial = recorded(point, main_event, replace(check, scale=8))
    assert trial.status == "failed"
    assert trial.images_per_second is trial.step_ms is trial.breakdown_ms is trial.bus_bandwidth_gbps is None
    unsure = trial.emulation.model_copy(update={"converged": False, "check_ratio": 1.4})
    summary.show([trial.model_copy(update={"emulation": unsure})], load(tmp_path), {}, store.RunFolder(tmp_path))
    row = next(line for line in screen.getvalue().splitlines() if "1G" in line)
    assert "FAILED: fabric0 sent" in row and "images/s" not in row and "not converged" not in row


def test_failed_trial_of_an_earlier_version_shows_no_rate_anywhere(tmp_path: Path, capsys) -> None:
    def fail(trial: dict) -> None:
        if trial["point"]["nodes"] == 8:
            trial.update(status="failed", error="another job ran")

    folder = copy("straggler", tmp_path, fail)
    old = json.loads((folder / "trials.jsonl").read_text().splitlines()[-1])
    assert old["images_per_second"]
    rate = f"{old['images_per_second']['median']:.4g}"
    trial = next(trial for trial in runs.load(folder).trials if trial.point.nodes == 8)
    assert trial.images_per_second is None
    for words in (["report"], ["explain"], ["export", "--format", "csv"], ["export", "--format", "mlperf"]):
        assert main([*words[:1], str(folder), *words[1:]]) == 0
        assert rate[:6] not in capsys.readouterr().out
    assert "another job ran" in (folder / "report.md").read_text()
    assert Trial.model_validate(old).status == "failed"


@pytest.mark.parametrize(("nodes", "fix"), [(64, "run `make scale NODES=64`"), (99, "a cluster has at most 64")])
def test_advice_for_too_many_nodes_can_be_followed(tmp_path: Path, nodes: int, fix: str) -> None:
    (tmp_path / "plan.yml").write_text(yaml.safe_dump({"nodes": [nodes], "batches": [32], "fabrics": ["1g"]}))
    with pytest.raises(UserError, match=f"plan.nodes: {nodes} nodes requested.*{fix}"):
        check.check(schema.load(str(tmp_path / "plan.yml")), None, available=4)


def test_sweep_stops_at_once_when_the_node_that_launches_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, screen: io.StringIO
) -> None:
    monkeypatch.setattr(executors.ssh, "offline", lambda _, names: [name for name in names if name == "head"])
    run = sweep(load(tmp_path), tmp_path / "run")
    with pytest.raises(InfraError, match="node head launches all trials and is offline"):
        run.run()
    assert not run.folder.trials()
