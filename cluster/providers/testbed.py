"""What GPULab and the Virtual Wall share: doctor's check, error lines of their tools, the entry point for Terraform."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from cluster.core import errors
from cluster.core.errors import InfraError, UserError
from cluster.providers import certificate
from cluster.providers.base import Check


def certificate_check(pem: str, field: str) -> Check:
    """The line of `cluster doctor` about the login certificate."""
    try:
        end = certificate.expiry(certificate.check(pem, field))
    except UserError as error:
        return Check("certificate", False, str(error), certificate.DOWNLOAD)
    return Check("certificate", True, f"valid until {end:%Y-%m-%d}")


def error_line(output: str) -> str:
    """The last line of a tool's output that mentions an error, else its last line; "" if there is none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = [line for line in lines if re.search("error|fail|wrong", line, re.IGNORECASE)]
    return (found or lines or [""])[-1][:300]


def run_tool(action: Callable[[], None], state_folder: Path | None = None) -> int:
    """Run an action of a tool. A provisioner leaves its error in the state folder, from where `cluster` prints it."""
    try:
        action()
    except (InfraError, UserError) as error:
        if state_folder:
            errors.pass_on(state_folder, error)
        print(f"fatal: {error}", file=sys.stderr)
        return 1
    return 0
