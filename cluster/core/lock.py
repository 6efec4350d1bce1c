"""Locks: one command at a time measures or changes an environment, and nothing disturbs a measurement on this machine.

A lock belongs to a process and ends with it, however it ends. Its file says who holds it. The file is never removed:
whoever made it anew would not wait for those who hold the removed one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.core.errors import InfraError, UserError

# Of all users and checkouts: their local nodes share the cores.
MACHINE = Path(os.environ.get("HOROVOD_CLUSTER_MACHINE_LOCK") or "/tmp/horovod-cluster.lock")  # noqa: S108
# holder() takes the lock for a moment to see whether it is free.
PROBE_SECONDS = 0.5
LONGEST = 200
# Of a holder that has not written its name yet, or no longer.
UNKNOWN = 0
# The locks of this process: a sweep that holds one may deploy.
_ours: set[Path] = set()


@dataclass(frozen=True)
class Holder:
    command: str
    pid: int
    since: float

    def __str__(self) -> str:
        if self.pid == UNKNOWN:
            return self.command
        return f"`{self.command}` (pid {self.pid}, since {time.strftime('%H:%M:%S', time.localtime(self.since))})"


@contextmanager
def environment(path: Path, env: str) -> Iterator[None]:
    """For everything that measures or changes an environment. Raises UserError if another process does."""

    def refuse(who: str) -> None:
        raise UserError(f"ENV={env}: {who} is using it; wait until it ends")

    with _hold(path, refuse):
        yield


def on_stderr(text: str) -> None:
    if text:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def measuring(provider: str, progress: Callable[[str], None] = on_stderr) -> Iterator[None]:
    """For measurements: on local nodes, wait until no other command measures or deploys on this machine."""
    with _machine(provider, progress, shared=False):
        yield


@contextmanager
def disturbing(provider: str, progress: Callable[[str], None]) -> Iterator[None]:
    """For deploys and users' scripts, several of which may run: on local nodes, wait until no other command measures on
    this machine. A measurement then waits for them."""
    with _machine(provider, progress, shared=True):
        yield


def holder(path: Path) -> Holder | None:
    """The process that holds a lock, or None."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return (_signatures(file) or [Holder("another command", UNKNOWN, time.time())])[-1]
    finally:
        os.close(file)


@contextmanager
def _machine(provider: str, progress: Callable[[str], None], shared: bool) -> Iterator[None]:
    if provider != "local":
        yield
        return

    def wait(who: str) -> None:
        progress(f"waiting for {who}: it would share this machine's cores" if who else "")

    with _hold(MACHINE, wait, shared, mode=0o666):
        yield


@contextmanager
def _hold(path: Path, busy: Callable[[str], None], shared: bool = False, mode: int = 0o644) -> Iterator[None]:
    """busy gets the holders. It raises, or returns to wait; after that it gets an empty text."""
    if path in _ours:
        yield
        return
    file = _open(path, mode)
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        if not _try(file, operation):
            busy(" and ".join(map(str, _signatures(file))) or "another command")
            fcntl.flock(file, operation)
            busy("")
        if not shared:
            os.ftruncate(file, 0)
        os.write(file, json.dumps(asdict(_signature())).encode() + b"\n")
        _ours.add(path)
        try:
            yield
        finally:
            _ours.discard(path)
            if not shared:
                os.ftruncate(file, 0)
    finally:
        os.close(file)


def _open(path: Path, mode: int) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            # Linux refuses O_CREAT for another user's file in /tmp.
            return os.open(path, flags)
        file = os.open(path, flags | os.O_CREAT, mode)
        with suppress(PermissionError):
            # Whatever the umask says.
            os.fchmod(file, mode)
        return file
    except OSError as error:
        raise InfraError(f"{path}: cannot be locked: {error.strerror}") from None


def _try(file: int, operation: int) -> bool:
    end = time.monotonic() + PROBE_SECONDS
    while True:
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
        time.sleep(0.02)


def _signature() -> Holder:
    words = [Path(sys.argv[0]).name, *map(without_value, sys.argv[1:])]
    return Holder(shlex.join(words)[:LONGEST], os.getpid(), time.time())


def without_value(word: str) -> str:
    """A variable that `bench run --env` gives to a script may be a secret."""
    name, found, _ = word.removeprefix("--env=").partition("=")
    return f"{name}=***" if found and not name.startswith("-") else word


def _signatures(file: int) -> list[Holder]:
    """Of processes that live: one that was killed leaves its line, and another user may write anything."""
    found = []
    for line in os.pread(file, 10_000, 0).decode(errors="replace").splitlines():
        with suppress(ValueError, TypeError, KeyError):
            values = json.loads(line)
            command = "".join(letter for letter in str(values["command"])[:LONGEST] if letter.isprintable())
            one = Holder(command, int(values["pid"]), float(values["since"]))
            if one.pid != os.getpid() and Path(f"/proc/{one.pid}").exists():
                found.append(one)
    return found
