"""Time a deploy of 4 and of 10 nodes from a cached image, and a second deploy that changes nothing.

Run on an idle machine: `make perf-deploy`. Creates an environment of its own and removes it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

from test_cluster import BIN, make_env  # noqa: E402

ENV = "perfdeploy"


def timed(*words: str) -> float:
    begin = time.monotonic()
    subprocess.run([BIN / "cluster", "--env", ENV, *words], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begin


def main() -> None:
    shutil.rmtree(ROOT / "inventories" / ENV, ignore_errors=True)
    make_env(ENV, 83, 1)
    try:
        # Builds the image if it is missing, which is not part of the measurement.
        timed("deploy")
        timed("destroy")
        seconds = {}
        print(f"{'nodes':>6} {'deploy s':>9} {'again s':>8}")
        for nodes in (4, 10):
            seconds[nodes] = timed("deploy", "--nodes", str(nodes))
            again = timed("deploy")
            timed("destroy")
            print(f"{nodes:>6} {seconds[nodes]:>9.1f} {again:>8.1f}", flush=True)
        print(f"10 nodes take {seconds[10] / seconds[4]:.2f} times as long as 4")
    finally:
        timed("destroy")
        shutil.rmtree(ROOT / "inventories" / ENV, ignore_errors=True)


if __name__ == "__main__":
    main()
