"""Measure, explain and predict how data-parallel training scales over a network.

`bench.load()` opens a run (docs/python-api.md). This file is copied to nodes with bench.worker, so it imports nothing
before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from bench.api import Run

__version__ = "0.1.0"


def load(path: str | Path = "latest") -> Run:
    """Open a run: a run folder, a trials file, or `latest` for the newest run in results/."""
    from bench.api import load

    return load(path)
