"""Processes on the nodes that are neither the launch's nor the system's: what disturbed a trial."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bench import words
from cluster.core import ssh
from cluster.core.config import layout
from cluster.core.contract import Contract
from cluster.core.errors import UserError
from cluster.core.printable import printable
from cluster.in_use import is_work

COMMAND = "ps -eo pid=,ppid=,user:32=,pcpu=,args="
# Also as the training account: in a container root does not see whose sockets those of other accounts are.
SOCKETS = "sudo ss -tunipOH; sudo -u {user} ss -tunipOH"
# Milliseconds since a TCP socket last sent or received. The share's processes keep idle connections to all nodes.
ACTIVE_MS = 1000
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


def find(contract: Contract, nodes: Iterable[str], run: str, senders: bool = False) -> list[str]:
    """One text per node with foreign processes; only those that use the fabric if these are wanted.

    A node that does not answer has none.
    """
    command = f"{COMMAND}; {SOCKETS.format(user=layout()['user'])}" if senders else COMMAND
    answers = ssh.run_on_all(contract, nodes, command, timeout=10)
    texts = (
        on_node(node, done.stdout, run, peers(contract, node) if senders else None) for node, done in answers.items()
    )
    return [text for text in texts if text]


def refuse_run_on_head(contract: Contract) -> None:
    """What people start by `bench run` on the head takes this lock (bench/worker/on_head.py)."""
    question = "flock --nonblock --conflict-exit-code 75 /etc/horovod-cluster/hostfile true"
    for node, done in ssh.run_on_all(contract, [contract.head], question, timeout=10).items():
        if done.returncode == 75:
            raise UserError(f"{node}: somebody started a run there that uses the nodes; wait, or end it by Ctrl-C")


def peers(contract: Contract, node: str) -> set[str]:
    """Fabric addresses of the other nodes."""
    return {
        address for name, other in contract.nodes.items() if name != node for address in other.fabric_addresses.values()
    }


def on_node(node: str, listing: str, run: str, to: set[str] | None = None) -> str:
    found = foreign(list(parse(listing)), run)
    if to is not None:
        active = connected(listing, to)
        found = [one for one in found if one.pid in active]
    shown = [f"{printable(one.command)[:WIDTH]} (pid {one.pid}, {one.user})" for one in found]
    return f"{node}: {words.several(shown, SHOWN)}" if shown else ""


def connected(listing: str, to: set[str]) -> set[int]:
    """Processes with a socket to one of these addresses, TCP only if it was in use a moment ago."""
    found: set[int] = set()
    for line in listing.splitlines():
        parts = line.split(None, 6)
        if len(parts) < 7 or parts[0] not in ("tcp", "udp"):
            continue
        peer = parts[5].rpartition(":")[0].strip("[]").removeprefix("::ffff:")
        # ss leaves a zero out, and has neither for UDP.
        quiet = dict(re.findall(r"\b(lastsnd|lastrcv):(\d+)", parts[6]))
        if peer in to and min(int(quiet.get(way, 0)) for way in ("lastsnd", "lastrcv")) < ACTIVE_MS:
            found |= {int(pid) for pid in re.findall(r"\bpid=(\d+)", parts[6])}
    return found


def parse(listing: str) -> Iterator[Process]:
    for line in listing.splitlines():
        parts = line.split(None, 4)
        if len(parts) == 5 and parts[0].isdigit():
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
