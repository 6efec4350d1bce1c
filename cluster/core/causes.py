"""Why Terraform or Ansible failed: one line with the cause, made from their output."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

from cluster.core import files
from cluster.core.errors import InfraError

LONGEST = 600
# The name of a node and of a systemd unit -> the last lines of the unit's journal on that node.
Journal = Callable[[str, str], str]
# What a module says without saying why; the reason is in another field.
EMPTY_MESSAGES = ("non-zero return code", "MODULE FAILURE")
# systemd's own lines about a unit that failed; the reason is what the unit printed before.
SYSTEMD = re.compile(
    r"^(Starting |Started |Stopping |Stopped |Failed to start|\S+: (Main|Control|Failed|Scheduled|Start|Consumed))"
)


def terraform(output: str) -> str:
    """The first error of Terraform: its title, its explanation and its place."""
    lines = [line.lstrip(" │╷╵").rstrip() for line in output.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith(("Error: ", "Warning: "))]
    start = next((number for number in starts if lines[number].startswith("Error: ")), None)
    if start is None:
        return ([line for line in lines if line] or ["no output"])[-1][:LONGEST]
    end = next((number for number in starts if number > start), len(lines))
    title, block = lines[start].removeprefix("Error: "), lines[start + 1 : end]
    place = next((match[1] for line in block if (match := re.match(r"on (\S+ line \d+)", line))), "")
    paragraphs = [" ".join(lines) for found, lines in groupby(block, key=bool) if found]
    # The first one shows the place, the source and the values in it.
    text = " ".join(one for one in paragraphs if not re.match(r"on \S+ line|with \S+,", one))
    if "Output: " in text:
        # A tool that Terraform ran: its own words.
        return text.partition("Output: ")[2][:LONGEST]
    return f"{title}: {text}{f' ({place})' if place else ''}"[:LONGEST]


def ansible(output: str, journal: Journal) -> str:
    """The first failed task: its node, its name and its message. A service that failed adds its own last words."""
    task = ""
    for line in output.splitlines():
        if match := re.match(r"(?:TASK|RUNNING HANDLER) \[(.+)\] \**$", line):
            task = match[1]
        if match := re.match(r"fatal: \[([^\]]+)\]: \w+! => (\{.*)", line):
            host = match[1].split(" -> ")[-1]
            return f"{host}: {task}: {_message(match[2], host, journal)}"[:LONGEST]
    marked = [line for line in output.splitlines() if re.match(r"\[ERROR\]|ERROR!|Error:", line)]
    return (marked or [line for line in output.splitlines() if line.strip()] or ["no output"])[-1].strip()[:LONGEST]


def _message(text: str, host: str, journal: Journal) -> str:
    try:
        found = files.answer(text, "Ansible", dict[str, Any])
    except InfraError:
        return text
    said = str(found.get("msg") or "")
    if not said or said.startswith(EMPTY_MESSAGES):
        more = str(found.get("stderr") or found.get("module_stderr") or found.get("stdout") or "").strip()
        said = f"{said}: {more.splitlines()[-1]}" if more else said or text
    if unit := re.search(r"systemctl status ([\w@.:-]+)", said):
        words = [line for line in journal(host, unit[1]).splitlines() if line.strip() and not SYSTEMD.match(line)]
        said = said.partition('See "systemctl status')[0].strip()
        said += f" {words[-1].strip()}" if words else f" {unit[1]} printed nothing."
    return " ".join(said.split())
