"""bench report --example: the report of a run that comes with the package."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench.cli import main
from bench.report import command
from bench.results import store

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(store, "RESULTS", tmp_path / "results")
    for name in DISPLAYS:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "results"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were opened in a browser."""
    addresses: list[str] = []
    monkeypatch.setattr(command.webbrowser, "open", lambda address: addresses.append(address) or True)
    return addresses


def test_example_is_opened_where_there_is_a_display(results, opened, monkeypatch) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    before = sorted(command.EXAMPLE.iterdir())
    assert main(["report", "--example"]) == 0
    assert opened == [(results / "example/report.html").as_uri()]
    assert "On 1G four emulated P100 nodes" in (results / "example/report.md").read_text()
    # The package may be read-only, and make report must not take the example for the latest run.
    assert sorted(command.EXAMPLE.iterdir()) == before
    assert not list(results.rglob("trials.jsonl"))


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac always has a display")
def test_example_says_where_it_is_and_how_to_look_at_it_without_a_display(results, opened, capsys) -> None:
    assert main(["report", "--example"]) == 0
    printed = capsys.readouterr().out
    assert f"wrote {results}/example/report.html" in printed
    assert f"python3 -m http.server --bind 127.0.0.1 --directory {results}/example 8000" in printed
    assert opened == []


def test_example_says_how_to_look_at_it_when_no_browser_starts(results, monkeypatch, capsys) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(command.webbrowser, "open", lambda address: False)
    assert main(["report", "--example"]) == 0
    assert "http.server" in capsys.readouterr().out


def test_example_as_json_opens_nothing(results, opened, monkeypatch, capsys) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    assert main(["report", "--example", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [Path(name).name for name in printed["files"]] == ["report.html", "report.md"]
    assert printed["verdict"]["limit"] == "network"
    assert opened == []


def test_example_next_to_a_run_is_refused(results, tmp_path: Path, capsys) -> None:
    assert main(["report", "--example", os.fspath(tmp_path)]) == 2
    assert "--example" in capsys.readouterr().err
    assert not results.exists()
