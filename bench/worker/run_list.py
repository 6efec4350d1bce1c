"""Print the records of all runs on the share, as JSON. Sent to the head as text: it needs no other file."""

import json
import pathlib
import sys


def main() -> None:
    found = []
    for folder in sorted(pathlib.Path(sys.argv[1]).glob("*")):
        if (folder / "run.json").exists():
            run = json.loads((folder / "run.json").read_text())
            end = folder / "end.json"
            # systemd makes this folder for the launcher's unit and removes it with the unit.
            live = pathlib.Path(f"/run/run-{folder.name}-launch").exists()
            # Of a run that somebody started on the head.
            live = live or (not end.exists() and pathlib.Path(f"/proc/{run.get('pid', 'none')}").exists())
            run["end"] = json.loads(end.read_text()) if end.exists() and not live else None
            run["state"] = "running" if live else run["end"]["state"] if run["end"] else "lost"
            found.append(run)
    print(json.dumps(found))
