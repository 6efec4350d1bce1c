"""How a tool that Terraform starts tells why it failed: Terraform breaks its output over lines of its own width."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.errors import InfraError, UserError

NAME = "failure.json"


def write(folder: Path, error: UserError | InfraError) -> None:
    (folder / NAME).write_text(json.dumps({"user": isinstance(error, UserError), "text": str(error)}))


def take(folder: Path) -> UserError | InfraError | None:
    """What was written, once."""
    path = folder / NAME
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    path.unlink()
    return UserError(found["text"]) if found["user"] else InfraError(found["text"])
