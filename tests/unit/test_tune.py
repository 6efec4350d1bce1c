"""Tuning without a cluster: the search against a made-up machine, what is kept and what is not."""

from __future__ import annotations

import random

import pytest
import yaml

from bench.tune import command as tune
from cluster import tuning
from cluster.core.errors import InfraError
from cluster.tuning import UNTUNED, Tuning


def machine(noise: float, seed: int = 1, gain: float = 0.5):
    """A step that is faster over Gloo and a little faster still with a long cycle."""
    generator = random.Random(seed)
    calls = []

    def measure(settings: Tuning, seconds: float) -> list[float]:
        calls.append((settings, seconds))
        base = 1.0 if settings.engine == "horovod-mpi" else gain
        base *= 1 - 0.1 * (settings.cycle_ms == 10.0)
        return [base * generator.gauss(1, noise) for _ in range(int(3 * seconds))]

    return measure, calls


def find(measure, incumbent=UNTUNED, budget=1e9):
    return tune.search(incumbent, UNTUNED, measure, lambda: budget, lambda text: None)


def test_fastest_candidate_wins_and_is_significantly_better():
    measure, _ = machine(0.02)
    winner, now, defaults, _ = find(measure)
    assert (winner.settings.engine, winner.settings.cycle_ms) == ("horovod-gloo", 10.0)
    assert now is defaults
    assert tune.better(winner, now)


def test_noise_alone_is_not_kept():
    generator = random.Random(5)
    kept = 0
    for _ in range(20):
        winner, now, _, _ = find(lambda settings, seconds: [generator.gauss(1, 0.05) for _ in range(int(3 * seconds))])
        kept += winner is not now and tune.better(winner, now)
    assert kept <= 2


def test_losers_are_measured_less():
    measure, calls = machine(0.01)
    winner, _, _, seen = find(measure)
    spent = {one.settings.model_dump_json(): 0.0 for one in seen}
    for settings, seconds in calls:
        spent[settings.model_dump_json()] += seconds
    assert spent[winner.settings.model_dump_json()] == 7 * tune.FIRST_SECONDS
    assert sorted(spent.values())[len(spent) // 2] == tune.FIRST_SECONDS


def test_spent_budget_still_compares_with_what_is_in_force():
    measure, calls = machine(0.01)
    winner, now, defaults, seen = find(measure, incumbent=Tuning(), budget=0)
    assert {settings.engine for settings, _ in calls} == {"horovod-gloo", "horovod-mpi"}
    assert now.steps
    assert defaults.steps
    assert winner is now
    assert any("not reached" in tune.describe(one) for one in seen)


def test_candidate_that_fails_is_left_out():
    good, _ = machine(0.01)

    def measure(settings, seconds):
        if settings.engine == "horovod-gloo":
            raise InfraError("no route")
        return good(settings, seconds)

    winner, _, _, seen = find(measure)
    assert winner.settings.engine == "horovod-mpi"
    assert any("no route" in tune.describe(one) for one in seen)


def test_explanation_names_the_engine_first():
    measure, _ = machine(0.01)
    *_, seen = find(measure)
    assert tune.what_mattered(seen)[0]["setting"] == "engine"


def test_winner_is_added_to_what_other_fabrics_have(tmp_path, monkeypatch):
    path = tmp_path / "tuning.yml"
    monkeypatch.setattr(tuning, "file", lambda env: path)
    tune.write(path, "1g", Tuning(cycle_ms=10))
    tune.write(path, "10g", Tuning(engine="horovod-mpi"))
    assert tuning.load("any") == {"1g": Tuning(cycle_ms=10), "10g": Tuning(engine="horovod-mpi")}
    assert not list(tmp_path.glob("*.new"))
    assert yaml.safe_load(path.read_text())["tuning"]["1g"]["cycle_ms"] == 10


@pytest.mark.parametrize("text", ["tuning: {1g: {cycle_ms: -1}}", "[1, 2]", "tuning: {1g: {colour: red}}"])
def test_wrong_tuning_file_is_one_line(tmp_path, monkeypatch, text):
    path = tmp_path / "tuning.yml"
    path.write_text(text)
    monkeypatch.setattr(tuning, "file", lambda env: path)
    with pytest.raises(tuning.UserError) as caught:
        tuning.load("any")
    assert str(caught.value).startswith("tuning.yml: ")
    assert "\n" not in str(caught.value)
