"""The errors a command line prints as one line, and the exit codes that go with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

PASSED_ON = "failure.json"
# A message is read on a terminal: what a file or a tool adds to it is cut.
LONGEST = 1500
# What pydantic adds to the path of a field that takes values of several types.
ALTERNATIVE = re.compile(r"constrained-|(dict|list)\[")


def bounded(text: str, longest: int = LONGEST) -> str:
    """One line of limited length."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest // 2]} [...] {line[-longest // 4 :]}"


class UserError(Exception):
    """Something the user wrote is wrong. The message names the field and the fix; nothing was changed."""

    exit_code = 2


class InfraError(Exception):
    """A machine, network, disk or tool failed. What was measured so far is on disk."""

    exit_code = 3


def one_line(error: ValidationError, prefix: str) -> str:
    """The first problem of a ValidationError as 'where: what', with the path a user can search for."""
    errors = error.errors()
    # Of a field with several types, the type that fits most of the value.
    first = max((one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]), key=lambda one: len(one["loc"]))
    path = [str(part) for part in first["loc"] if not ALTERNATIVE.match(str(part))]
    where = ".".join([prefix, *(bounded(part, 80) for part in path)])
    text = first["msg"].removeprefix("Value error, ")
    got = "" if first["type"] in ("missing", "value_error") else f", got {bounded(repr(first['input']), 80)}"
    if first["type"] == "extra_forbidden":
        text, got = "unknown field; remove it or correct its spelling", ""
    return bounded(f"{where}: {text}{got}", 400)


def pass_on(folder: Path, error: UserError | InfraError) -> None:
    """For tools that Terraform starts: keep the error in a file, since Terraform breaks their output into lines."""
    (folder / PASSED_ON).write_text(json.dumps({"user": isinstance(error, UserError), "text": str(error)}))


def take(folder: Path) -> UserError | InfraError | None:
    """The error that a tool passed on, once."""
    path = folder / PASSED_ON
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
        return (UserError if found["user"] else InfraError)(str(found["text"]))
    except (ValueError, KeyError, TypeError):
        # Cut off by a kill or a full disk.
        return None
    finally:
        path.unlink()
