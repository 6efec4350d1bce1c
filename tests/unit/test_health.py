"""What a node reports about itself."""

from __future__ import annotations

import json
from subprocess import CompletedProcess

import pytest

from cluster import health
from cluster.health import Health, judge


def answer(mbit: float | None = 1000.0, code: int = 0, problems: str = "", error: str = "") -> CompletedProcess[str]:
    shown = json.dumps({"interface": "fabric0", "mbit": mbit}) if not code else ""
    return CompletedProcess([], code, f"{problems}{shown}", error)


def test_rate_that_a_killed_sweep_left_is_reported() -> None:
    """After kill -9 the fabric stayed at 125 Mbit/s, and doctor said ok."""
    found = judge(answer(125.0), 1000)
    assert not found.problem
    assert "125 Mbit/s instead of 1000" in found.throttled
    assert "no limit" in judge(answer(None), 1000).throttled


@pytest.mark.parametrize(("mbit", "wanted"), [(1000.0, 1000), (999.999, 1000), (125.0, None), (None, None)])
def test_right_rate_unshaped_fabric_and_running_command_are_fine(mbit: float | None, wanted: float | None) -> None:
    assert judge(answer(mbit), wanted) == Health()


def test_problems_are_named() -> None:
    assert judge(answer(problems="problem nftables is not active\n"), 1000).problem == "nftables is not active"
    assert "denied" in judge(answer(code=255, error="Permission denied (publickey).\n"), 1000).problem
    assert judge(answer(code=1), 1000).problem
    assert "\x1b" not in judge(answer(code=255, error="\x1b[2J\n"), 1000).problem


def test_every_unit_is_looked_at() -> None:
    assert {"nftables", "fabric-rate", "cluster-hosts", "ssh"} == set(health.UNITS)
    assert all(unit in health.LOOK for unit in health.UNITS)
