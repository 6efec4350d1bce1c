"""When the nodes end themselves. The date is in the state folder, on every node and in the tag Expires."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cluster.core import files, ssh
from cluster.core.contract import Contract
from cluster.core.state import write_file

FORMAT = "%Y-%m-%dT%H:%MZ"
TAG = "Expires"
# EC2 takes the instances of a capacity block this long before the block's end.
BLOCK_MARGIN = timedelta(minutes=30)
# terraform/aws/node/cluster-expiry, which cloud-init installs.
TOOL = "/usr/local/sbin/cluster-expiry"


def read(path: Path) -> datetime | None:
    return datetime.strptime(files.text(path), FORMAT).replace(tzinfo=UTC) if path.exists() else None


def write(path: Path, end: datetime) -> None:
    write_file(path, end.strftime(FORMAT))


def end_after(hours: int, block_end: datetime | None) -> datetime:
    """The end of a cluster that starts or is renewed now."""
    end = datetime.now(UTC) + timedelta(hours=hours)
    return min(end, block_end - BLOCK_MARGIN) if block_end else end


def send(contract: Contract, end: datetime, idle_minutes: int | None, nodes: Iterable[str]) -> list[str]:
    """Set the date and the idle time on the nodes; returns those that did not take it."""
    command = f"sudo -n {TOOL} set {end.strftime(FORMAT)} {idle_minutes or 0}"
    answers = ssh.run_on_all(contract, nodes, command, timeout=30)
    return [name for name, done in answers.items() if done.returncode]


def note(end: datetime, env: str) -> str:
    """The line of `cluster status`."""
    hours = (end - datetime.now(UTC)).total_seconds() / 3600
    renew = f"to extend: make renew ENV={env}"
    if hours > 0:
        return f"nodes end themselves in {hours:.1f} hours ({end:%Y-%m-%d %H:%M} UTC); {renew}"
    return f"expired at {end:%Y-%m-%d %H:%M} UTC; to remove what is left: make destroy ENV={env}"
