"""The certificate with which a testbed knows its user: is it there, is it readable only by its owner, is it valid."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from cluster.core.errors import UserError


def expiry(pem: Path) -> datetime:
    done = subprocess.run(
        ["openssl", "x509", "-noout", "-enddate", "-in", pem], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError("no certificate in it")
    text = done.stdout.strip().removeprefix("notAfter=")
    return datetime.strptime(text, "%b %d %H:%M:%S %Y %Z").replace(tzinfo=UTC)


def check(text: str, field: str) -> Path:
    """The PEM's path when it can be used; a UserError that names the field otherwise. Its content is never shown."""
    pem = Path(text).expanduser()
    if not pem.is_file():
        raise UserError(f"{field}: {pem} does not exist; download your login certificate from the account portal")
    if pem.stat().st_mode & 0o077:
        raise UserError(f"{field}: {pem} can be read by others; run `chmod 600 {pem}`")
    try:
        end = expiry(pem)
    except ValueError as error:
        raise UserError(f"{field}: {pem}: {error}; download your login certificate from the account portal") from None
    if end < datetime.now(UTC):
        raise UserError(f"{field}: the certificate expired on {end:%Y-%m-%d}; download a new one from the portal")
    return pem


def password(file: str | None, field: str) -> str | None:
    """The PEM's password from TESTBED_PEM_PASSWORD or a file; None where the PEM has none."""
    if value := os.environ.get("TESTBED_PEM_PASSWORD"):
        return value
    if not file:
        return None
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"{field}: {path} does not exist; write the password there or set TESTBED_PEM_PASSWORD")
    if path.stat().st_mode & 0o077:
        raise UserError(f"{field}: {path} can be read by others; run `chmod 600 {path}`")
    return path.read_text().strip()
