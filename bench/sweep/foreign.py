"""Processes on the nodes that are neither the launch's nor the system's: what disturbed a trial."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bench import words
from cluster.core import ssh
from cluster.core.config import layout
from cluster.core.contract import Contract
from cluster.core.printable import printable
from cluster.in_use import is_work

COMMAND = "ps -eo pid=,ppid=,user:32=,pcpu=,args="
# Of other accounts only those count that compute: a daemon of the system waits most of the time.
BUSY_PERCENT = 5.0
# Ours outlive our ranks for a moment, and everybody else's start programs that are listed themselves.
STARTERS = ("orted", "sudo ", "sh -c ", "bash -c ")
WIDTH, SHOWN = 80, 3


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    user: str
    percent: float
    command: str


def find(contract: Contract, nodes: Iterable[str], run: str) -> list[str]:
    """One text per node with foreign processes. A node that does not answer has none."""
    answers = ssh.run_on_all(contract, nodes, COMMAND, timeout=10)
    return [text for node, done in answers.items() if (text := on_node(node, done.stdout, run))]


def on_node(node: str, listing: str, run: str) -> str:
    found = foreign(list(parse(listing)), run)
    shown = [f"{printable(one.command)[:WIDTH]} (pid {one.pid}, {one.user})" for one in found]
    return f"{node}: {words.several(shown, SHOWN)}" if shown else ""


def parse(listing: str) -> Iterator[Process]:
    for line in listing.splitlines():
        parts = line.split(None, 4)
        if len(parts) == 5:
            pid, parent, user, percent, command = parts
            yield Process(int(pid), int(parent), user, float(percent), command)


def foreign(processes: list[Process], run: str) -> list[Process]:
    """The busiest first. Ours are those that name the run, what started them, and what they started."""
    by_pid = {one.pid: one for one in processes}
    named = {one.pid for one in processes if run in one.command}
    ours = set(named)
    for one in processes:
        line = set(ancestors(one, by_pid))
        if one.pid in named:
            ours |= line
        elif line & named:
            ours.add(one.pid)
    account = layout()["user"]
    found = [
        one
        for one in processes
        if one.pid not in ours
        and is_work(one.command)
        and not one.command.startswith((*STARTERS, "["))
        and (one.user == account or one.percent >= BUSY_PERCENT)
    ]
    return sorted(found, key=lambda one: -one.percent)


def ancestors(one: Process, by_pid: dict[int, Process]) -> Iterator[int]:
    seen: set[int] = set()
    while (parent := by_pid.get(one.parent)) and parent.pid not in seen:
        seen.add(parent.pid)
        yield parent.pid
        one = parent
