"""Root on this machine: podman, mmdebstrap and nft need it, and nothing else does."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

from cluster.core.errors import UserError


@cache
def available() -> bool:
    """Whether this user is root, or may become root without a password."""
    if os.geteuid() == 0:
        return True
    return bool(shutil.which("sudo")) and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0


def require(tool: str) -> None:
    if not available():
        raise UserError(f"{tool} needs root on this machine; run the command as root, or allow sudo without a password")


def sudo(tool: str, *options: str) -> list[str]:
    """The words before a tool that needs root."""
    require(tool)
    return [] if os.geteuid() == 0 else ["sudo", "-n", *options]
