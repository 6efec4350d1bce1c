"""Tuning without a cluster: the search on a simulated machine, and the file of settings."""

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
    result = find(measure)
    assert (result.winner.settings.engine, result.winner.settings.cycle_ms) == ("horovod-gloo", 10.0)
    assert result.current is result.defaults
    assert result.improved


def test_noise_alone_is_no_improvement():
    generator = random.Random(5)
    kept = 0
    for _ in range(20):
        result = find(lambda settings, seconds: [generator.gauss(1, 0.05) for _ in range(int(3 * seconds))])
        kept += result.improved
    assert kept <= 2


def test_slow_candidates_are_measured_for_less_time():
    measure, calls = machine(0.01)
    result = find(measure)
    spent = {candidate.settings.model_dump_json(): 0.0 for candidate in result.candidates}
    for settings, seconds in calls:
        spent[settings.model_dump_json()] += seconds
    assert spent[result.winner.settings.model_dump_json()] == 7 * tune.FIRST_SECONDS
    assert sorted(spent.values())[len(spent) // 2] == tune.FIRST_SECONDS


def test_current_settings_and_defaults_are_measured_without_budget():
    measure, calls = machine(0.01)
    result = find(measure, incumbent=Tuning(), budget=0)
    assert {settings.engine for settings, _ in calls} == {"horovod-gloo", "horovod-mpi"}
    assert result.current.steps
    assert result.defaults.steps
    assert result.winner is result.current
    assert any("not measured" in tune.describe(candidate) for candidate in result.candidates)


def test_failed_candidate_cannot_win():
    good, _ = machine(0.01)

    def measure(settings, seconds):
        if settings.engine == "horovod-gloo":
            raise InfraError("no route")
        return good(settings, seconds)

    result = find(measure)
    assert result.winner.settings.engine == "horovod-mpi"
    assert any("no route" in tune.describe(candidate) for candidate in result.candidates)


def test_engine_has_the_largest_effect():
    measure, _ = machine(0.01)
    assert tune.setting_effects(find(measure).candidates)[0]["setting"] == "engine"


def test_settings_of_one_fabric_keep_those_of_others(tmp_path, monkeypatch):
    path = tmp_path / "tuning.yml"
    monkeypatch.setattr(tuning, "file", lambda env: path)
    tune.write(path, "1g", Tuning(cycle_ms=10))
    tune.write(path, "10g", Tuning(engine="horovod-mpi"))
    assert tuning.load("any") == {"1g": Tuning(cycle_ms=10), "10g": Tuning(engine="horovod-mpi")}
    assert not list(tmp_path.glob("*.new"))
    assert yaml.safe_load(path.read_text())["tuning"]["1g"]["cycle_ms"] == 10


@pytest.mark.parametrize("text", ["tuning: {1g: {cycle_ms: -1}}", "[1, 2]", "tuning: {1g: {colour: red}}"])
def test_bad_tuning_file_gives_one_line(tmp_path, monkeypatch, text):
    path = tmp_path / "tuning.yml"
    path.write_text(text)
    monkeypatch.setattr(tuning, "file", lambda env: path)
    with pytest.raises(tuning.UserError) as caught:
        tuning.load("any")
    assert str(caught.value).startswith("tuning.yml: ")
    assert "\n" not in str(caught.value)
