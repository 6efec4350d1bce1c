"""A log of submitted and ended jobs. Each step is written before and after it happens, so that a destroy after a kill
finds every job."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """id is empty if we were stopped before GPULab answered the submission."""

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

    def requested(self, name: str) -> None:
        self._append(event="asked", name=name)

    def submitted(self, name: str, identifier: str) -> None:
        self._append(event="submitted", name=name, id=identifier)

    def refused(self, name: str) -> None:
        self._append(event="refused", name=name)

    def ended(self, name: str, status: str) -> None:
        self._append(event="ended", name=name, status=status)

    def open(self) -> list[Entry]:
        """Jobs that have not ended as far as we know, in the order of submission."""
        found: dict[str, Entry] = {}
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                event = json.loads(line)
            except ValueError:  # a line that a kill cut off: its job stays open
                continue
            name = event["name"]
            if event["event"] == "asked":
                found[name] = Entry(name, "")
            elif event["event"] == "submitted":
                found[name] = Entry(name, event["id"])
            else:
                found.pop(name, None)
        return list(found.values())
