"""Where trials were measured: what differs between two provenance files."""

from __future__ import annotations

import json
from typing import Any

FIRST = "provenance.json"
# The name of a later sweep's file, if its environment differs: provenance-2.json.
PATTERN = r"^provenance(-[0-9]{1,6})?\.json$"
TIMES = ("created", "finished")


def differences(before: dict[str, Any], after: dict[str, Any], ignored: tuple[str, ...] = TIMES) -> list[str]:
    out = []
    for name in sorted(before.keys() | after.keys()):
        if name in ignored:
            continue
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            for part in sorted(old.keys() | new.keys()):
                if old.get(part) != new.get(part):
                    out.append(f"{name}.{part}: {brief(old.get(part))} then {brief(new.get(part))}")
        elif old != new:
            out.append(f"{name}: {brief(old)} then {brief(new)}")
    return out


def brief(value: object) -> str:
    if value is None:
        return "absent"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
