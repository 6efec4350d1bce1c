"""The file of a selfcheck: what differed comes first."""

from __future__ import annotations

import json
from typing import Any

from bench.selfcheck.expectations import Finding


def summary(findings: list[Finding]) -> str:
    count = {state: sum(one.ok is state for one in findings) for state in (True, False, None)}
    rest = f"{count[True]} as expected, {count[None]} with nothing to compare"
    return f"{len(findings)} checks: {count[False]} differ, {rest}"


def lines(findings: list[Finding]) -> list[str]:
    return [f"- {one.subject}: expected {one.expected}; found {one.found}" for one in findings]


def markdown(findings: list[Finding], facts: dict[str, Any]) -> str:
    """facts: everything that was read, for whoever gets this file."""
    parts = [("What differs", False), ("As expected", True), ("Nothing to compare", None)]
    text = [f"# Selfcheck of {facts['env']}, {facts['created']}", "", summary(findings), ""]
    for title, state in parts:
        found = lines([one for one in findings if one.ok is state])
        text += [f"## {title}", "", *(found or ["- nothing"]), ""]
    return "\n".join([*text, "## Facts", "", "```json", json.dumps(facts, indent=1), "```", ""])
