"""What takes a minute or two besides a deploy and a sweep says what it does, on a terminal and in a log."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "e2e")]

import environments  # noqa: E402
import silence  # noqa: E402
from environments import BIN, ROOT  # noqa: E402

ENV = "silence"
pytestmark = pytest.mark.timeout(1500)
terminal_or_log = pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "log"])


@pytest.fixture(scope="module")
def deployed() -> Iterator[None]:
    environments.remove(ENV)
    environments.make_env(ENV, 87, 2)
    try:
        environments.cluster("deploy", env=ENV)
        yield
    finally:
        environments.remove(ENV)


@pytest.fixture(scope="module")
def start_up() -> float:
    """Seconds that a command needs before it can print, as busy as this machine is."""
    begin = time.monotonic()
    environments.run(BIN / "bench", "sweep", "--dry-run", "--plan", "quick")
    return time.monotonic() - begin


def check(start_up: float, terminal: bool, *words: str | Path) -> silence.Recording:
    shown = silence.record([BIN / "bench", *words], terminal=terminal, cwd=ROOT)
    assert shown.returncode == 0, shown.text
    first = shown.parts[0][0]
    if terminal:
        assert first < 2 * start_up
    later = [(at - first, text) for at, text in shown.parts]
    assert silence.problems(silence.Recording(terminal, later, shown.seconds - first)) == []
    return shown


@terminal_or_log
def test_collectives_are_never_silent(deployed: None, start_up: float, terminal: bool) -> None:
    shown = check(start_up, terminal, "comm", "--env", ENV, "--seconds", "1")
    assert "measured all_reduce-" in shown.text


@terminal_or_log
def test_tuning_is_never_silent(deployed: None, start_up: float, terminal: bool) -> None:
    check(start_up, terminal, "tune", "--env", ENV, "--minutes", "1", "--explain")


@terminal_or_log
def test_large_dry_run_is_never_silent(start_up: float, terminal: bool, tmp_path: Path) -> None:
    plan = {
        **{"nodes": [*range(1, 65)], "batches": [*range(8, 136, 8)], "fabrics": ["1g"], "repeats": 8},
        **{"engines": ["horovod-mpi", "horovod-gloo", "ddp"], "models": ["resnet50", "vgg16"]},
    }
    (tmp_path / "large.yml").write_text(json.dumps(plan))
    shown = check(start_up, terminal, "sweep", "--dry-run", "--plan", tmp_path / "large.yml")
    assert "49152 trials" in shown.text


@terminal_or_log
def test_calibration_is_never_silent(start_up: float, terminal: bool) -> None:
    run = ROOT / "tests/fixtures/runs/network-1g"
    check(start_up, terminal, "predict", "--calibrate", run, "--gpus", "4,8,16,32,64,128,256,512,1024")
