"""What the last deploy measured of the cluster's link."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from bench.results.trial import LinkEvidence
from cluster.core import files
from cluster.core.errors import UserError
from cluster.core.state import State


def read(state: State) -> LinkEvidence | None:
    """None if the last deploy measured no link."""
    try:
        found = files.mapping(state.validation)
        ring = found["ring"]
        outcome: Literal["ok", "warned", "failed"] = "ok" if found["ok"] is True else "failed"
        if outcome == "ok" and (found.get("warnings") or any(row.get("warning") for row in ring)):
            outcome = "warned"
        return LinkEvidence(
            fabric=found["fabric"],
            share=min(row["gbps"] for row in ring) / found["rate_gbps"],
            measured=datetime.fromtimestamp(state.validation.stat().st_mtime, UTC).isoformat(timespec="seconds"),
            outcome=outcome,
        )
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None
