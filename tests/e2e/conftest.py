"""The end-to-end tests boot nodes with podman and read the host's firewall."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import checkouts


def pytest_collection_modifyitems() -> None:
    if os.geteuid() != 0:
        pytest.exit("tests/e2e boots nodes and needs root", returncode=2)


@pytest.fixture(scope="module", autouse=True)
def alone(request: pytest.FixtureRequest) -> Iterator[None]:
    with checkouts.alone(request.module.__name__):
        yield
