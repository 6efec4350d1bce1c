"""Unpack a tar archive that other machines wrote, but nothing that leaves the folder.

tarfile's own filters do this from Python 3.11.4 on; Debian 12 has 3.11.2.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

# Readable by all, written by the owner only, and nothing that runs as somebody else.
MODES = 0o755


def unpack(tar: tarfile.TarFile, target: Path, refused: Callable[[str], None] = lambda _: None) -> None:
    """Members belong to the account that unpacks. `refused` gets a sentence for each one that is left out."""
    base = Path(os.path.realpath(target))
    # A filter would be applied a second time.
    tar.extraction_filter = lambda member, _: member
    for member in tar:
        if reason := refusal(member, base):
            refused(f"{member.name} {reason}")
            continue
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        member.mode &= MODES
        tar.extract(member, base)


def refusal(member: tarfile.TarInfo, base: Path) -> str:
    """Why a member is left out. The folder holds the members before it, so their links count."""
    if not inside(base / member.name, base):
        return "is outside the folder"
    if member.islnk() and not inside(base / member.linkname, base):
        return "is a link to a file outside the folder"
    if member.issym():
        if member.linkname.startswith("/"):
            return "is a link to an absolute path"
        if not inside((base / member.name).parent / member.linkname, base):
            return "is a link to a file outside the folder"
    return "" if member.isreg() or member.isdir() or member.issym() or member.islnk() else "is not a file or folder"


def inside(path: Path, base: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(base)
