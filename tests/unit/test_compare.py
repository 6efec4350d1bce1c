from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_cases import RUNS, copy

from bench import compare
from bench.cli import main
from bench.results.trial import Interval


def slower(share: float):
    def change(trial: dict) -> None:
        if trial["point"]["nodes"] > 1:
            for name in ("median", "low", "high"):
                trial["images_per_second"][name] *= 1 - share
                trial["step_ms"][name] /= 1 - share

    return change


def test_same_run_has_no_regression(capsys) -> None:
    assert main(["compare", str(RUNS / "network-1g"), str(RUNS / "network-1g")]) == 0
    assert "0 regressions, 0 improvements, 90 unchanged." in capsys.readouterr().out


def test_regression_exits_1_and_says_which_tolerance_would_have_passed(tmp_path: Path, capsys) -> None:
    folder = copy("straggler", tmp_path, slower(0.1234))
    args = ["compare", str(RUNS / "straggler"), str(folder)]
    assert main(args) == 1
    text = capsys.readouterr().out
    assert "3 regressions" in text
    assert "--tolerance 12.4% would have passed." in text
    assert main([*args, "--tolerance", "12.4%"]) == 0
    assert main([*args, "--tolerance", "0.123"]) == 1


def test_improvement_is_no_failure(tmp_path: Path, capsys) -> None:
    folder = copy("straggler", tmp_path, slower(-0.2))
    assert main(["compare", str(RUNS / "straggler"), str(folder)]) == 0
    assert "3 improvements" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ((80, 70, 99), "noise"),
        ((90, 89, 91), "regression"),
        ((97, 96.9, 97.1), "within tolerance"),
        ((110, 109, 111), "improvement"),
        ((104, 90, 120), "noise"),
    ],
)
def test_a_change_counts_only_beyond_tolerance_and_intervals(after: tuple[float, ...], verdict: str) -> None:
    before = Interval(median=100, low=98, high=102)
    found = Interval(median=after[0], low=after[1], high=after[2])
    assert compare.judge(before, found, 0.05)[0] == verdict


def test_point_that_fails_now_is_a_regression_no_tolerance_forgives(tmp_path: Path, capsys) -> None:
    def fail(trial: dict) -> None:
        if trial["point"]["nodes"] == 8:
            trial.update(status="failed", error="w2 went away")

    folder = copy("straggler", tmp_path, fail)
    assert main(["compare", str(RUNS / "straggler"), str(folder), "--tolerance", "0.9"]) == 1
    text = capsys.readouterr().out
    assert "fails now: w2 went away" in text and "No tolerance would have passed" in text


def test_committed_trials_file_can_be_the_baseline(tmp_path: Path, capsys) -> None:
    baseline = tmp_path / "baseline.jsonl"
    baseline.write_bytes((RUNS / "straggler" / "trials.jsonl").read_bytes())
    folder = copy("straggler", tmp_path, lambda trial: trial["point"]["nodes"] < 8)
    assert main(["compare", str(baseline), str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["a"] == "baseline"
    assert report["only_in_a"] == ["10G, eight nodes, batch 64"]
    assert len(report["points"]) == 3


def test_environment_differences_are_shown(tmp_path: Path, capsys) -> None:
    folder = copy("straggler", tmp_path)
    provenance = json.loads((folder / "provenance.json").read_text())
    provenance["versions"]["torch"] = "3.0.0"
    (folder / "provenance.json").write_text(json.dumps(provenance))
    assert main(["compare", str(RUNS / "straggler"), str(folder)]) == 0
    assert "versions.torch: 2.13.0 then 3.0.0" in capsys.readouterr().out


def test_runs_without_a_common_point_exit_2(capsys) -> None:
    assert main(["compare", str(RUNS / "straggler"), str(RUNS / "network-1g")]) == 2
    assert "no point in common" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["lots", "-1%", "1.5", "100%"])
def test_bad_tolerance_exits_2(text: str, capsys) -> None:
    assert main(["compare", str(RUNS / "straggler"), str(RUNS / "straggler"), f"--tolerance={text}"]) == 2
    assert "--tolerance" in capsys.readouterr().err


def test_transport_that_changed_is_noted_and_the_point_still_compares(tmp_path: Path, capsys) -> None:
    folder = copy("compute-ib", tmp_path, lambda trial: trial["point"].update(transport="tcp"))
    assert main(["compare", str(RUNS / "compute-ib"), str(folder)]) == 0
    text = capsys.readouterr().out
    assert "(transport verbs then tcp)" in text and "4 unchanged" in text


def test_table_stays_whole_when_it_is_piped(capsys) -> None:
    assert main(["compare", str(RUNS / "network-1g"), str(RUNS / "network-1g")]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if ", batch 96" in line]
    assert len(rows) == 30 and all(row.endswith("noise") for row in rows)
