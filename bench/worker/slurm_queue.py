"""A line of Slurm's squeue. Text, because its JSON changes between versions. Standard library only."""

import re
from dataclasses import dataclass

FORMAT = "%T|%r|%S"


@dataclass(frozen=True)
class Job:
    state: str
    reason: str = ""
    expected: str = ""  # start of a job that waits


def lacks_nodes(job: Job) -> bool:
    """Whether a job waits for nodes that are down or drained, not for other jobs."""
    return job.state == "PENDING" and bool(re.search(r"UnavailableNodes:\w|DOWN, DRAINED", job.reason))


def parse(line: str) -> Job | None:
    """A line in the format above."""
    parts = line.strip().split("|")
    if len(parts) != 3:
        return None
    state, reason, expected = parts
    waits = state == "PENDING" and expected != "N/A"
    return Job(state, "" if reason == "None" else reason, expected if waits else "")
