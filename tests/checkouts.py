"""Tests that boot nodes use the same names and subnets in every checkout: those of two checkouts take turns."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.core.state import CACHE


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Wait until no other checkout runs the tests of this name."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"test-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
