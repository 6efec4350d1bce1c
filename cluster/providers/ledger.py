"""A log of submitted and ended jobs. Each step is written before and after it happens, so that a destroy after a kill
finds every job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from cluster.core import files
from cluster.core.errors import InfraError


class Event(TypedDict):
    event: str
    name: str
    id: NotRequired[str]


class Ledger:
    def __init__(self, file: Path) -> None:
        self.file = file

    def add(self, event: Literal["asked", "submitted", "refused", "ended"], name: str, **values: str) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps({"event": event, "name": name, **values}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def open(self) -> dict[str, str]:
        """Name -> id of the jobs that have not ended as far as we know, in the order of submission.

        The id is empty if we were stopped before the submission was answered.
        """
        found: dict[str, str] = {}
        for line in files.text(self.file).splitlines() if self.file.exists() else []:
            try:
                event = files.answer(line, self.file.name, Event)
            except InfraError:  # a line that a kill cut off: its job stays open
                continue
            if event["event"] in ("asked", "submitted"):
                found[event["name"]] = event.get("id", "") if event["event"] == "submitted" else ""
            else:
                found.pop(event["name"], None)
        return found
