"""Tests that boot nodes: those of two checkouts take turns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import checkouts
with checkouts.alone("nodes"):
    os.mkdir("booted")
    time.sleep(0.5)
    os.rmdir("booted")
"""


def test_second_checkout_waits_for_the_first(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, ROOT, ROOT / "tests"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    both = [subprocess.Popen(command, cwd=tmp_path, env=env) for _ in range(2)]
    deadline = time.monotonic() + 60
    assert [process.wait(timeout=deadline - time.monotonic()) for process in both] == [0, 0]
