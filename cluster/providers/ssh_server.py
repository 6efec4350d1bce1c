"""Whether an SSH server answers. Standard library only: Terraform starts this once per node."""

from __future__ import annotations

import socket
import time
from contextlib import suppress


def is_ssh(address: str, port: int, timeout: float) -> bool:
    """Whether the server on this port speaks SSH; OSError if nothing answers."""
    with socket.create_connection((address, port), timeout) as connection:
        return connection.recv(4) == b"SSH-"


def wait_for(address: str, port: int, seconds: float) -> bool:
    """Try until an SSH server answers or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if is_ssh(address, port, timeout=2):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
