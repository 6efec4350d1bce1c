"""Make tests/standins importable, and never wait for a sweep elsewhere on this machine."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core import lock

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session", autouse=True)
def own_machine_lock() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        lock.MACHINE = Path(folder) / "machine.lock"
        os.environ["HOROVOD_CLUSTER_MACHINE_LOCK"] = str(lock.MACHINE)
        yield
