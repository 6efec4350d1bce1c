"""Print the records of all runs on the share, as JSON. Sent to the head as text: it needs no other file."""

import json
import pathlib
import sys
import typing

# What every record has. A full disk or an editor can damage the file.
EMPTY = {"command": "(run.json is damaged)", "engine": "", "nodes": [], "points": [], "groups": []}


def read(path: pathlib.Path) -> dict[str, typing.Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def main() -> None:
    found = []
    for folder in sorted(pathlib.Path(sys.argv[1]).glob("*")):
        if (folder / "run.json").exists():
            record = read(folder / "run.json") or {}
            whole = record.keys() >= EMPTY.keys()
            run = {**(record if whole else EMPTY), "id": folder.name}
            end = folder / "end.json"
            # systemd makes this folder for the launcher's unit and removes it with the unit.
            live = pathlib.Path(f"/run/run-{folder.name}-launch").exists()
            # Of a run that somebody started on the head.
            live = live or (not end.exists() and pathlib.Path(f"/proc/{run.get('pid', 'none')}").exists())
            run["end"] = None if live else read(end)
            ended = "lost" if run["end"] is None else str(run["end"].get("state", "lost"))
            run["state"] = "running" if live else ended if whole else "damaged"
            found.append(run)
    print(json.dumps(found))
