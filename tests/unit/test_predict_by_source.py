"""The promises on groups that the model has not seen: `bench predict --validate --by-source`."""

from __future__ import annotations

import json

import pytest

from bench.catalogue import measurements
from bench.predict import by_source, learn
from cluster.core.config import ROOT

Judged = list[by_source.Judged]


@pytest.fixture(scope="module")
def judged() -> Judged:
    return by_source.judge_all()


def test_every_row_is_judged_but_the_outliers_of_their_sources(judged: Judged) -> None:
    rows = measurements.every()
    assert sum(one.how == "cold" for one in judged) == len(rows) - sum(row.outlier for row in rows)
    assert {one.row.laboratory for one in judged} == {row.laboratory for row in rows}


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("cold, rate stated", 0.12),
        ("anchored", 0.07),
        ("parameter servers, BytePS, cold", 0.25),
        ("parameter servers, TensorFlow, cold", 0.25),
        ("parameter servers, BytePS, anchored", 0.12),
        ("parameter servers, TensorFlow, anchored", 0.12),
    ],
)
def test_mean_error_of_unseen_groups(name: str, most: float, judged: Judged) -> None:
    assert by_source.summary(judged)[name] <= most


@pytest.mark.parametrize("laboratory", ["hkbu", "nvidia"])
def test_bert_beats_a_constant_efficiency(laboratory: str, judged: Judged) -> None:
    sums = by_source.summary(judged)
    assert sums[f"BERT, {laboratory}"] < sums[f"BERT, {laboratory}, constant efficiency 0.95"]


def test_the_interval_holds_what_it_promises(judged: Judged) -> None:
    assert 0.75 <= by_source.summary(judged)["inside the interval"] <= 0.88


def test_parameters_are_learnt_without_the_group_that_is_judged() -> None:
    rows = [row for row in measurements.every() if row.laboratory in ("hkbu", "uber", "huyutuo")]
    known = learn.slopes(rows)
    without = learn.learn([one for one in known if one.row.laboratory != "uber"])
    assert without != learn.learn(known)
    assert without == learn.learn([one for one in known if one.row.laboratory in ("hkbu", "huyutuo")])


def test_the_command_prints_the_table_and_the_outliers(
    judged: Judged, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_source, "judge_all", lambda: judged)
    assert by_source.run(as_json=False) == 0
    text = capsys.readouterr().out
    assert "rate not stated" in text
    assert "left out: 4" in text
    assert by_source.run(as_json=True) == 0
    assert {"groups", "summary", "outliers"} == set(json.loads(capsys.readouterr().out))


def test_the_documents_table_is_what_the_command_prints(judged: Judged) -> None:
    """`bench predict --validate --by-source --json` has the figures to copy."""
    page = (ROOT / "docs/predict.md").read_text()
    for line in by_source.table(judged):
        figures = (line.rows, f"{line.mean_error:.1%}", f"{line.worst:.0%}", line.inside)
        row = " | ".join(map(str, (line.laboratory, line.kind, line.how, *figures)))
        assert f"| {row} |" in page, row
    for name, value in by_source.summary(judged).items():
        if name != "inside the interval" and "constant" not in name:
            assert f"| {name} | {value:.1%} |" in page, name
