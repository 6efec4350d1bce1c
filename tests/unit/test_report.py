from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from report_cases import ANSWERS, RUNS, copy, judged

from bench import words
from bench.cli import main
from bench.explain import diagnosis
from bench.report import page, plots
from bench.results import runs, store
from bench.results.points import tabulate
from bench.results.trial import Interval


def report(folder: Path, tmp_path: Path, *more: str) -> tuple[str, str]:
    out = tmp_path / "out"
    assert main(["report", str(folder), "--out", str(out), *more]) == 0
    return (out / "report.html").read_text(), (out / "report.md").read_text()


@pytest.mark.parametrize("name", ANSWERS)
def test_report_comes_out_for_every_case(name: str, tmp_path: Path) -> None:
    html, text = report(RUNS / name, tmp_path)
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])
    trials = [t for t in runs.load(RUNS / name).trials if t.status == "ok" and t.point.repeat == 0]
    assert sum(len(group) for group in data["rows"]) == len(trials)
    assert judged(RUNS / name).sentence.split(":")[0] in text


def test_truncated_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    folder = copy("network-1g", tmp_path)
    file = folder / "trials.jsonl"
    file.write_bytes(file.read_bytes()[:-200])
    run = runs.load(folder)
    assert len(run.trials) == 89
    html, text = report(folder, tmp_path)
    assert "is cut off" in html and "is cut off" in text


def test_foreign_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = copy("straggler", tmp_path)
    file = folder / "trials.jsonl"
    file.write_text('{"foo": 1}\nnot json\n[]\n' + file.read_text())
    html, _ = report(folder, tmp_path)
    assert "3 lines of trials.jsonl are not trials" in html
    assert judged(folder).limit == "straggler"


def test_report_of_only_foreign_lines_says_so(tmp_path: Path) -> None:
    folder = copy("straggler", tmp_path)
    (folder / "trials.jsonl").write_text('{"foo": 1}\n\x00\x01\n')
    html, text = report(folder, tmp_path)
    assert "holds no readable trial" in html
    assert "No verdict yet" in text


def test_binary_garbage_is_survived(tmp_path: Path) -> None:
    folder = copy("straggler", tmp_path)
    (folder / "trials.jsonl").write_bytes(bytes(range(256)) * 40)
    (folder / "plan.json").write_bytes(b"\xff\xfe")
    (folder / "provenance.json").write_text("[1]")
    html, _ = report(folder, tmp_path)
    assert "plan.json: not UTF-8" in html
    assert "provenance.json: not a mapping" in html


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("point", "nodes"), 0),
        (("link_gbps",), -1.0),
        (("step_ms", "high"), 1e300),
    ],
)
def test_impossible_values_are_left_out_and_said(where: tuple[str, ...], value: float, tmp_path: Path) -> None:
    def spoil(trial: dict) -> None:
        if trial["point"]["nodes"] == 4:
            part = trial if len(where) == 1 else trial[where[0]]
            part[where[-1]] = value

    folder = copy("straggler", tmp_path, spoil)
    html, _ = report(folder, tmp_path)
    assert "1 line of trials.jsonl" in html and "is not possible" in html
    assert judged(folder).limit == "straggler"


def test_emulated_trials_without_their_scale_model_are_still_explained(tmp_path: Path, capsys) -> None:
    folder = str(copy("network-1g", tmp_path, lambda trial: trial.update(emulation=None)))
    for argv in (["explain", folder], ["compare", folder, folder], ["export", folder]):
        assert main(argv) == 0, capsys.readouterr().err


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-300, 0.0])
def test_step_time_that_nobody_can_measure_is_left_out_and_said(value: float, tmp_path: Path) -> None:
    def spoil(trial: dict) -> None:
        if trial["point"]["nodes"] == 4:
            trial["step_ms"]["median"] = value

    folder = copy("straggler", tmp_path, spoil)
    html, _ = report(folder, tmp_path)
    assert "1 line of trials.jsonl is not a trial" in html
    assert judged(folder).limit == "straggler"


def test_endless_error_texts_do_not_fill_the_page(tmp_path: Path) -> None:
    folder = copy("straggler", tmp_path, lambda t: t.update(status="failed", error="x" * 1_000_000))
    html, text = report(folder, tmp_path)
    assert len(html) < 2_000_000 and len(text) < 50_000


def test_missing_fabric_and_files_are_said(tmp_path: Path) -> None:
    folder = copy("network-1g", tmp_path, lambda trial: trial["point"]["fabric"] != "ib")
    html, _ = report(folder, tmp_path)
    assert "planned but not measured: fabric InfiniBand" in html
    (folder / "provenance.json").unlink()
    html, _ = report(folder, tmp_path)
    assert "planned but not measured: fabric ib" in html
    assert "provenance.json: missing" in html


def test_run_of_failed_trials_only(tmp_path: Path) -> None:
    def fail(trial: dict) -> None:
        trial.update(status="failed", error="w2 went away", error_node="w2", traffic=None)
        for name in ("step_ms", "images_per_second", "breakdown_ms", "bus_bandwidth_gbps"):
            trial[name] = None

    html, text = report(copy("straggler", tmp_path, fail), tmp_path)
    assert "all 4 trials failed" in text
    assert html.count("w2 went away") >= 4


def test_optional_measurements_may_all_be_absent(tmp_path: Path) -> None:
    def bare(trial: dict) -> None:
        for name in ("breakdown_ms", "bus_bandwidth_gbps", "link_gbps", "traffic", "host_cpu_percent", "timing"):
            trial[name] = None

    html, _ = report(copy("network-1g", tmp_path, bare), tmp_path)
    assert "no breakdown of the step time was recorded" in html
    assert "what limits it was not recorded" in html


def test_later_record_of_a_trial_replaces_the_earlier(tmp_path: Path) -> None:
    folder = copy("straggler", tmp_path)
    file = folder / "trials.jsonl"
    first = json.loads(file.read_text().splitlines()[0])
    first.update(status="failed", error="node was down", step_ms=None, images_per_second=None)
    file.write_text(json.dumps(first) + "\n" + file.read_text())
    run = runs.load(folder)
    assert len(run.trials) == 4
    assert not run.failed


@pytest.mark.parametrize(
    ("make", "words_"),
    [
        (lambda path: path / "nowhere", "does not exist"),
        (lambda path: path, "is not a run: it has no trials.jsonl"),
        (lambda path: Path(__file__), "is not a run: no line in it is a trial"),
    ],
)
def test_what_is_not_a_run_is_one_line_and_exit_2(make, words_: str, tmp_path: Path, capsys) -> None:
    assert main(["report", str(make(tmp_path))]) == 2
    error = capsys.readouterr().err
    assert words_ in error
    assert error.count("\n") == 1


def test_latest_is_the_newest_run(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(store, "RESULTS", tmp_path / "results")
    assert main(["report", "latest"]) == 2
    assert "no run under results/" in capsys.readouterr().err
    import os

    for age, name in enumerate(["straggler", "compute-ib"]):
        folder = copy(name, tmp_path / "results" / "local")
        os.utime(folder / "trials.jsonl", (1000 - age, 1000 - age))
    assert main(["report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["limit"] == "straggler"
    assert (tmp_path / "results/local/straggler/report.html").is_file()


def test_latest_of_an_environment_is_its_newest_run(tmp_path: Path, monkeypatch, capsys) -> None:
    """As in the example of `bench predict --help`: --calibrate results/local/latest."""
    monkeypatch.setattr(store, "RESULTS", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    copy("network-1g", tmp_path / "results/local")
    copy("straggler", tmp_path / "results/other")
    assert main(["predict", "--calibrate", "results/local/latest", "--gpus", "10,1024", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"]
    assert main(["explain", "results/nosuch/latest"]) == 2
    assert "no run under results/nosuch/" in capsys.readouterr().err


def test_plots_are_written_as_png_and_svg(tmp_path: Path) -> None:
    report(RUNS / "engines", tmp_path, "--plots", "png,svg")
    folder = tmp_path / "out" / "plots"
    names = {path.name for path in folder.iterdir()}
    for chart in plots.CHARTS:
        assert {f"{chart}.png", f"{chart}.svg"} <= names
        assert (folder / f"{chart}.png").read_bytes().startswith(b"\x89PNG")
        svg = (folder / f"{chart}.svg").read_text()
        assert "EMULATED P100" in svg, "the picture itself must say that it is emulated"
        assert "CONSTRUCTED" in svg


def test_unknown_plot_format_is_refused(tmp_path: Path, capsys) -> None:
    assert main(["report", str(RUNS / "engines"), "--out", str(tmp_path), "--plots", "gif"]) == 2
    assert "--plots" in capsys.readouterr().err


def test_hostile_strings_are_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>|`*"

    def poison(trial: dict) -> None:
        trial["stragglers"] = [evil] if trial["stragglers"] else []
        trial["point"]["fabric"] = evil
        if trial["point"]["nodes"] == 8:
            trial.update(status="failed", error=evil, error_node=evil)

    folder = copy("straggler", tmp_path, poison)
    (folder / "provenance.json").write_text(json.dumps({"nodes": [evil], "created": evil, "```": "```\n" + evil}))
    html, text = report(folder, tmp_path)
    assert "<script>alert" not in html and "<img src=x" not in html
    assert html.count("<script") == 3 and html.count("</script>") == 3
    fenced_off = "".join(part for index, part in enumerate(text.split("````")) if index % 2 == 0)
    assert "<script>" not in fenced_off and "<img" not in fenced_off


def test_page_has_no_address_to_fetch_from(tmp_path: Path) -> None:
    html, _ = report(RUNS / "network-1g", tmp_path)
    outside = html.replace(page.library(), "")
    assert "src=" not in outside.replace("img-src", "").replace("script-src", "").replace("style-src", "")
    assert "default-src 'none'" in html and "unsafe-eval" not in html


def test_ten_thousand_trials_stay_under_ten_megabytes(tmp_path: Path) -> None:
    sys.path.insert(0, str(RUNS.parents[1] / "perf"))
    import report_scale

    report_scale.write_trials(tmp_path / "trials.jsonl", "many curves", 10_000)
    html, _ = report(tmp_path, tmp_path)
    assert len(html) < 10_000_000
    data = json.loads(html.split('id="data">')[1].split("</script>")[0])
    assert sum(len(group) for group in data["rows"]) == 10_000


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123456, "0.0123"), (6.4, "6.4"), (219.3, "219"), (12345.0, "12,300"), (0, "0"), (7.0, "7")]
)
def test_significant_digits(value: float, text: str) -> None:
    assert words.significant(value) == text


def test_stray_interface_needs_missing_bytes_on_the_right_one() -> None:
    trial = runs.load(RUNS / "straggler").trials[-1].model_copy(deep=True)
    assert trial.traffic is not None
    for node in trial.traffic.other_bytes:
        trial.traffic.other_bytes[node] = {"eth0": 1e12}
    assert diagnosis.stray_traffic(trial) is None, "busy management traffic beside a used fabric is no fault"


def test_interval_of_efficiency_contains_its_median() -> None:
    for point in tabulate(runs.load(RUNS / "network-1g").trials).points:
        found = point.efficiency
        assert isinstance(found, Interval) and found.low <= found.median <= found.high


@pytest.mark.parametrize(
    ("name", "transport", "text"),
    [
        ("ib", "verbs", "InfiniBand"),
        ("ib", "tcp", "ib"),
        ("infiniband", "tcp", "infiniband"),
        ("10g", "tcp", "10G"),
        ("100g", "verbs", "100G (verbs)"),
        ("efa", "efa", "efa"),
        ("ib", None, "ib"),
    ],
)
def test_infiniband_is_a_matter_of_the_transport_and_not_of_the_name(
    name: str, transport: str | None, text: str
) -> None:
    assert words.fabric_name(name, transport) == text


def without_transport(trial: dict) -> None:
    trial["schema_version"] = 1
    del trial["point"]["transport"]


def test_run_of_schema_1_takes_the_transport_of_its_provenance(tmp_path: Path) -> None:
    folder = copy("network-1g", tmp_path, without_transport)
    found = {(trial.point.fabric, trial.point.transport) for trial in runs.load(folder).trials}
    assert found == {("1g", "tcp"), ("10g", "tcp"), ("ib", "verbs")}
    (folder / "provenance.json").write_text('{"fabrics": {"ib": {"transport": "carrier pigeon"}, "1g": 5}}')
    assert {trial.point.transport for trial in runs.load(folder).trials} == {"tcp"}


def test_recorded_transport_wins_over_the_provenance(tmp_path: Path) -> None:
    folder = copy("compute-ib", tmp_path, lambda trial: trial["point"].update(transport="tcp"))
    assert {trial.point.transport for trial in runs.load(folder).trials} == {"tcp"}
    html, text = report(folder, tmp_path)
    assert "InfiniBand" not in html and "InfiniBand" not in text


def test_transports_of_one_fabric_are_two_curves(tmp_path: Path) -> None:
    folder = copy("compute-ib", tmp_path)
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    for trial in trials:
        trial["id"] += "0"
        trial["point"]["transport"] = "tcp"
    with (folder / "trials.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(trial)}\n" for trial in trials)
    table = runs.load(folder).table()
    assert [point.link for point in table.points if point.nodes == 8] == [("ib", "tcp"), ("ib", "verbs")]
    assert all(len(point.trials) == 2 for point in table.points)
    assert plots.look_for(table, table.families[0]).fabrics == ("InfiniBand", "ib")


def test_report_names_the_line_that_it_left_out(tmp_path: Path, capsys) -> None:
    folder = copy("straggler", tmp_path)
    lines = (folder / "trials.jsonl").read_text().splitlines()
    (folder / "trials.jsonl").write_text("\n".join([lines[0], "nonsense", *lines[1:]]) + "\n")
    report(folder, tmp_path)
    assert "1 line of trials.jsonl" in (error := capsys.readouterr().err) and "line 2" in error
