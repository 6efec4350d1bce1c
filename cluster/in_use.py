"""What scale and destroy would interrupt and delete: say it, and ask before."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable

from cluster.core import lock, ssh
from cluster.core.config import layout
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.printable import printable
from cluster.core.state import State

# The training account's processes that are no work: logins, JupyterLab itself (not its kernels) and TensorBoard.
IDLE = ("sshd:", "/opt/jupyterlab/", "/lib/systemd/systemd", "/usr/lib/systemd/systemd", "(sd-pam)", "ps -")
SHOWN, WIDTH = 3, 100
SECONDS_TO_END = 60
# jupyterlab_venv in roles/jupyterlab/defaults/main.yml
SHIPPED = "/opt/jupyterlab/shipped"


def confirm(state: State, contract: Contract | None, nodes: Iterable[str], action: str, yes: bool, share: bool) -> None:
    """Say what runs on the nodes that go, and, if the share goes, what is in it.

    On a terminal, ask. Elsewhere go on, unless a run is in progress: then only with --yes.
    """
    user = lock.holder(state.lock)
    runs = [f"{user} is measuring on it"] if user and user.command.startswith("bench ") else []
    if user and not runs:
        raise UserError(f"ENV={state.env}: {user} is using it; wait until it ends")
    lost = []
    if contract:
        # Ranks of the measurement are not somebody else's.
        runs += [] if runs else processes(contract, nodes)
        lost = [files] if share and (files := share_content(contract)) else []
    if not runs and not lost:
        return
    asks = not yes and sys.stdin.isatty()
    if runs and not yes and not asks:
        raise UserError(f"ENV={state.env}: {'; '.join(runs)}; wait until it ends, or add --yes (make: YES=1)")
    for line in (*runs, *lost):
        print(line, file=sys.stderr)
    if asks:
        print(f"{action}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise UserError(f"ENV={state.env}: nothing was changed")
    if user:
        end(state, user)


def processes(contract: Contract, nodes: Iterable[str]) -> list[str]:
    """One line per node on which the training account runs something."""
    answers = ssh.run_on_all(contract, nodes, f"ps -u {layout()['user']} -o args=", timeout=15)
    lines = []
    for name, done in answers.items():
        work = [line.strip() for line in done.stdout.splitlines() if is_work(line.strip())]
        if work:
            shown = "; ".join(printable(line)[:WIDTH] for line in work[:SHOWN])
            more = f"; and {len(work) - SHOWN} more" if len(work) > SHOWN else ""
            lines.append(f"node {name} runs {shown}{more}")
    return lines


def is_work(command: str) -> bool:
    return bool(command) and not command.startswith(IDLE)


def share_content(contract: Contract) -> str:
    """What is in the share, or "" for an empty one or one that nodes do not serve themselves."""
    if contract.storage.backend in ("none", "existing") or contract.provider == "baremetal":
        return ""
    path = contract.storage.path
    done = ssh.run_on_all(contract, [contract.head], count_files(path), timeout=30)[contract.head]
    if done.returncode:
        return f"node {contract.head} does not answer: what is in {path} will be lost"
    count, size = map(float, done.stdout.split())
    return f"{count:.0f} files ({size / 1e6:.1f} MB) in {path} will be lost" if count else ""


def count_files(path: str, shipped: str = SHIPPED) -> str:
    """A shell command that prints number and size of the files that users made. Empty files are no data, root's are the
    roles', JupyterLab starts with our notebooks and examples, and results/sweeps has copies of the controller's."""
    copy = f'copy="{path}${{file#{shipped}}}"'
    ours = (
        f'for file in $(find {shipped} -type f); do {copy}; cmp -s "$file" "$copy" && set -- "$@" ! -path "$copy"; done'
    )
    sizes = (
        f"timeout 20 find {path} -type f -size +0 ! -user root ! -path '{path}/results/sweeps/*' \"$@\" -printf '%s\\n'"
    )
    return f"set --; {ours}; {sizes} | awk '{{n++; s+=$1}} END {{print n+0, s+0}}'"


def end(state: State, user: lock.Holder) -> None:
    """End the measurement that holds the lock. It restores the fabric and ends its ranks."""
    try:
        os.kill(user.pid, signal.SIGTERM)
    except PermissionError:
        raise InfraError(f"ENV={state.env}: {user} belongs to another account and cannot be ended") from None
    deadline = time.monotonic() + SECONDS_TO_END
    # On its way out it has already cleared its name.
    while (now := lock.holder(state.lock)) and now.pid in (user.pid, lock.UNKNOWN):
        if time.monotonic() > deadline:
            raise InfraError(f"ENV={state.env}: {user} does not end; run `kill -9 {user.pid}` and try again")
        time.sleep(0.2)
