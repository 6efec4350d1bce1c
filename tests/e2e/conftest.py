"""The end-to-end tests boot nodes with podman and read the host's firewall."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems() -> None:
    if os.geteuid() != 0:
        pytest.exit("tests/e2e boots nodes and needs root", returncode=2)
