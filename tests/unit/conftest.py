"""Make tests/standins importable, give every test the same terminal, and wait for no sweep on this machine."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core import lock

sys.path.insert(0, str(Path(__file__).parents[1]))
# On a dumb terminal there are no colours and no live lines to test.
os.environ["TERM"] = "xterm-256color"


@pytest.fixture(scope="session", autouse=True)
def own_machine_lock() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        lock.MACHINE = Path(folder) / "machine.lock"
        os.environ["HOROVOD_CLUSTER_MACHINE_LOCK"] = str(lock.MACHINE)
        yield
