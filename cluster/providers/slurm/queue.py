"""What scontrol and sacctmgr print as text. Their JSON changes between versions."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A job in such a state does not run again, unless it is requeued.
FINAL = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED"),
}


@dataclass(frozen=True)
class Partition:
    name: str
    nodes: int
    # None: no limit
    minutes: float | None
    default: bool
    up: bool


def minutes(text: str) -> float | None:
    """A time of Slurm, such as 1-02:00:00, 30:00 or UNLIMITED."""
    if text in ("UNLIMITED", "INFINITE", "NONE"):
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    # Without days, two numbers are minutes and seconds; with days, hours come first.
    seconds = {3: (3600, 60, 1), 2: (3600, 60) if days else (60, 1), 1: (3600,) if days else (60,)}[len(parts)]
    total = sum(part * factor for part, factor in zip(parts, seconds, strict=True))
    return int(days or 0) * 1440 + total / 60


def partitions(text: str) -> dict[str, Partition]:
    """The output of `scontrol --oneliner show partition`."""
    found = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        if name := fields.get("PartitionName"):
            found[name] = Partition(
                name=name,
                nodes=int(fields.get("TotalNodes", "0")),
                minutes=minutes(fields.get("MaxTime", "UNLIMITED")),
                default=fields.get("Default") == "YES",
                up=fields.get("State") == "UP",
            )
    return found


def accounts(text: str) -> set[str]:
    """The accounts that a user may use: `sacctmgr --noheader --parsable2 show associations ... format=Account`."""
    return {line.strip() for line in text.splitlines() if line.strip()}
