"""Which jobs we have asked for and which of them are over: written down before and after each step, so that a destroy
after a kill finds every one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """id is empty when we were stopped between asking and being answered."""

    name: str
    id: str


class Ledger:
    def __init__(self, file: Path) -> None:
        self.file = file

    def _append(self, **values: str) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def asked(self, name: str) -> None:
        self._append(event="asked", name=name)

    def submitted(self, name: str, job: str) -> None:
        self._append(event="submitted", name=name, id=job)

    def refused(self, name: str) -> None:
        self._append(event="refused", name=name)

    def ended(self, name: str, status: str) -> None:
        self._append(event="ended", name=name, status=status)

    def open(self) -> list[Entry]:
        """Jobs that are not known to be over, in the order they were asked for."""
        found: dict[str, Entry] = {}
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                event = json.loads(line)
            except ValueError:  # cut off by a kill: what it was about is still open
                continue
            name = event["name"]
            if event["event"] == "asked":
                found[name] = Entry(name, "")
            elif event["event"] == "submitted":
                found[name] = Entry(name, event["id"])
            else:
                found.pop(name, None)
        return list(found.values())
