"""nccl-tests beside our own figures: what it is started with, and its table read into rows of `bench comm`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cluster.core import ssh
from cluster.core.contract import Contract

FOLDER = "/opt/nccl-tests"
PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "broadcast": "broadcast_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
}
WARM_UP, REPETITIONS = 5, 20
# size, count, type, redop, root, then out-of-place and in-place: time, algbw, busbw, wrong elements
COLUMNS = 13


def installed(contract: Contract, names: Iterable[str]) -> bool:
    """Whether every node has it."""
    command = f"test -x {FOLDER}/{PROGRAMS['all_reduce']}"
    return all(done.returncode == 0 for done in ssh.run_on_all(contract, names, command).values())


def command(collective: str, smallest: int, largest: int, factor: int) -> tuple[str, ...]:
    """One process per GPU; -c 1 counts wrong elements."""
    sizes = ("-b", str(smallest), "-e", str(largest), "-f", str(factor))
    return (
        f"{FOLDER}/{PROGRAMS[collective]}",
        *sizes,
        "-g",
        "1",
        "-w",
        str(WARM_UP),
        "-n",
        str(REPETITIONS),
        "-c",
        "1",
    )


def rows(text: str) -> list[dict[str, Any]]:
    """The out-of-place columns. Its GB/s are bytes, ours Gbit/s; it prints no interval."""
    found = []
    for line in text.splitlines():
        # Other ranks and NCCL may print into the same stream.
        words = line.split()
        if len(words) != COLUMNS or not (words[0].isdigit() and words[1].isdigit()):
            continue
        time_us, algbw, busbw = map(float, words[5:8])
        found.append(
            {
                **{"size": int(words[0]), "count": int(words[1]), "type": words[2]},
                **{"time_us": time_us, "time_low_us": None, "time_high_us": None},
                **{"algbw_gbps": 8 * algbw, "busbw_gbps": 8 * busbw},
                # N/A: it was told not to count.
                **{"errors": int(float(words[8])) if words[8] != "N/A" else 0, "repetitions": REPETITIONS},
            }
        )
    return found
