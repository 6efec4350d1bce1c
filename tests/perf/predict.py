"""How fast predictions are (make perf-predict). Exits 1 when a promise is missed."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time

from bench.catalogue import models
from bench.predict.inputs import Setup
from bench.predict.step import predict

# CPU seconds, which other programs on the machine do not change: one prediction for the largest cluster, a table of a
# thousand configurations of every network, and the command from its start to its answer.
ONE_LIMIT, TABLE_LIMIT, COMMAND_LIMIT = 0.5, 10.0, 0.3
COMMAND = "import sys; from bench.cli import main; sys.exit(main(sys.argv[1:]))"
ASKED = ["predict", "--gpu", "v100", "--gpus", "8,16,32", "--gpus-per-node", "8", "--rate-gbps", "10,100"]
RATES = (1, 2.5, 5, 10, 25, 40, 50, 56, 100, 200, 400)
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


def command() -> float:
    """The best of three."""
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-c", COMMAND, *ASKED], stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(times)


def main() -> int:
    started = time.process_time()
    slowest = models.NAMES[2]
    predict(Setup(slowest, 64, 250.0, 2048, 8, 10.0))
    one = time.process_time() - started
    started = time.process_time()
    cases = itertools.product(models.NAMES, RATES, SIZES, ("tcp", "verbs"))
    table = [predict(Setup(model, 64, 250.0, gpus, 8, rate, via)) for model, rate, gpus, via in cases]
    each = (time.process_time() - started) / len(table)
    print(f"2048 GPUs, {slowest}: {one:.3f} s (limit {ONE_LIMIT})")
    print(f"1000 configurations: {1000 * each:.2f} s (limit {TABLE_LIMIT:g}; {len(table)} run)")
    started_in = command()
    print(f"bench predict, from start to answer: {started_in:.3f} s (limit {COMMAND_LIMIT})")
    return 0 if one < ONE_LIMIT and 1000 * each < TABLE_LIMIT and started_in < COMMAND_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
