"""What a deploy measured of a link: for which fabric it counts, when it does not, and that trials win over it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_cases import copy, judged
from test_sweep import report

from bench.results import runs
from bench.results.trial import LinkEvidence
from bench.sweep import evidence, record

ROW = {"node": "head", "to": "w1", "gbps": 0.94}
VALIDATION: dict[str, Any] = {"ok": True, "fabric": "1g", "rate_gbps": 1.0, "ring": [ROW, {**ROW, "gbps": 0.47}]}


def read(tmp_path: Path, content: str) -> LinkEvidence | None:
    path = tmp_path / "validation.json"
    path.write_text(content)
    os.utime(path, (1767225600, 1767225600))
    return evidence.read(SimpleNamespace(validation=path))


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "ok"),
        ({"ok": False}, "failed"),
        ({"warnings": ["head: the host is busy"]}, "warned"),
        ({"ring": [ROW, {**ROW, "gbps": 0.47, "warning": "the host is busy"}]}, "warned"),
        ({"warnings": [], "ring": [ROW, {**ROW, "gbps": 0.47, "warning": ""}]}, "ok"),
    ],
)
def test_evidence_has_its_fabric_its_time_and_the_outcome_of_its_validation(
    tmp_path: Path, changes: dict[str, Any], outcome: str
) -> None:
    found = read(tmp_path, json.dumps({**VALIDATION, **changes}))
    assert found == LinkEvidence(fabric="1g", share=0.47, measured="2026-01-01T00:00:00+00:00", outcome=outcome)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"ok": true}', '{"ok": true, "fabric": "1g", "rate_gbps": 0, "ring": []}', '{"ring": [3]}']
)
def test_damaged_validation_is_no_evidence(tmp_path: Path, content: str) -> None:
    assert read(tmp_path, content) is None


@pytest.mark.parametrize(
    ("fabric", "outcome", "link_gbps"),
    [("1g", "ok", 0.5), ("1g", "failed", None), ("1g", "warned", None), ("10g", "ok", None)],
)
def test_trial_takes_the_link_only_from_a_good_validation_of_its_own_fabric(
    fabric: str, outcome: Any, link_gbps: float | None
) -> None:
    point, event = report(["head", "w1"])
    seen = LinkEvidence(fabric=fabric, share=0.5, measured="2026-01-01T00:00:00+00:00", outcome=outcome)
    trial = record.trial(point, event, None, (164.0, "a table"), "fabric0", 1.0, "2026-01-01T00:00:00+00:00", seen)
    assert trial.link_gbps == link_gbps
    assert trial.link == (seen if fabric == "1g" else None)


def slow_link(trial: dict[str, Any]) -> None:
    if trial["link_gbps"]:
        trial["link_gbps"] = 0.47 * trial["point"]["rate_gbps"]


def test_what_a_trial_reached_wins_over_an_earlier_measurement_of_the_link(tmp_path: Path) -> None:
    folder = copy("network-1g", tmp_path, slow_link)
    found = judged(folder)
    assert found.limit == "network" and "repair" not in found.sentence
    for point in runs.load(folder).table().points:
        if point.link_gbps is not None and point.bus_gbps is not None:
            assert point.link_gbps >= point.bus_gbps.median


def test_slow_link_says_when_it_was_measured(tmp_path: Path) -> None:
    def measured(trial: dict[str, Any]) -> None:
        slow_link(trial)
        trial["started"] = "2026-01-04T00:00:00+00:00"
        trial["link"] = {"fabric": "1g", "share": 0.47, "measured": "2026-01-01T00:00:00+00:00", "outcome": "ok"}

    found = judged(copy("untuned-collective", tmp_path, measured))
    assert found.limit == "link" and found.diagnosis is not None
    assert found.diagnosis.reason.endswith("(measured by the deploy, three days before the trial)")


def test_run_of_an_earlier_version_keeps_the_link_of_the_fabric_that_was_measured_only(tmp_path: Path) -> None:
    folder = copy("network-1g", tmp_path)
    provenance = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps({**provenance, "cluster": {"active_fabric": "10g"}}))
    known = {point.fabric for point in runs.load(folder).table().points if point.link_gbps is not None}
    assert known == {"10g"}
