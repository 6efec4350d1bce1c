"""A testbed's login certificate: it exists, only its owner can read it, and it has not expired."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from cluster.core import files
from cluster.core.errors import UserError

DOWNLOAD = "download your login certificate from the account portal"


def expiry(pem: Path) -> datetime:
    argv = ["openssl", "x509", "-noout", "-enddate", "-in", str(pem)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError("contains no certificate")
    text = done.stdout.strip().removeprefix("notAfter=")
    # strptime raises ValueError too.
    return datetime.strptime(text, "%b %d %H:%M:%S %Y %Z").replace(tzinfo=UTC)


def require_private(path: Path, field: str) -> None:
    """UserError if other users can read the file."""
    if path.stat().st_mode & 0o077:
        raise UserError(f"{field}: {path} can be read by others; run `chmod 600 {path}`")


def check(text: str, field: str) -> Path:
    """The path of a usable PEM file, or a UserError that names the field. The content is never printed."""
    pem = Path(text).expanduser()
    if not pem.is_file():
        raise UserError(f"{field}: {pem} does not exist; {DOWNLOAD}")
    require_private(pem, field)
    try:
        end = expiry(pem)
    except ValueError as error:
        raise UserError(f"{field}: {pem} {error}; {DOWNLOAD}") from None
    if end < datetime.now(UTC):
        raise UserError(f"{field}: the certificate expired on {end:%Y-%m-%d}; {DOWNLOAD}")
    return pem


def password(file: str | None, field: str) -> str | None:
    """The password of the PEM file, from TESTBED_PEM_PASSWORD or from a file; None if it has no password."""
    if value := os.environ.get("TESTBED_PEM_PASSWORD"):
        return value
    if not file:
        return None
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"{field}: {path} does not exist; write the password there or set TESTBED_PEM_PASSWORD")
    require_private(path, field)
    return files.text(path, f"{field}: {path}").strip()
