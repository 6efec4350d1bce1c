"""Runs on a node as root, from standard input: writes files, then runs the commands of the files that changed.

Prints one JSON object. Imports little, to start fast. Before a file is written, its commands are recorded in PENDING. A
record is deleted when its command has succeeded, so the next run repeats a command that an interruption prevented.
"""

import grp
import hashlib
import json
import os
import pwd
import subprocess
import sys

PENDING = "/var/lib/horovod-cluster/pending"


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="surrogateescape")
    except FileNotFoundError:
        return None


def attributes(path):
    info = os.stat(path)
    return info.st_uid, info.st_gid, info.st_mode & 0o7777


def record(command):
    return os.path.join(PENDING, hashlib.sha256(command.encode()).hexdigest()[:16])


def put(entry, check):
    """Write the file unless `check` is set. Returns whether it differed, and its content before."""
    path, content = entry["dest"], entry["content"]
    before = read(path)
    if content is None:
        if before is None:
            return False, before
        if not check:
            add_pending(entry)
            os.unlink(path)
        return True, before
    wanted = pwd.getpwnam(entry["owner"]).pw_uid, grp.getgrnam(entry["group"]).gr_gid, int(entry["mode"], 8)
    if before == content and attributes(path) == wanted:
        return False, before
    if check:
        return True, before
    os.makedirs(os.path.dirname(path), exist_ok=True)
    new = f"{path}.new"
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content.encode(errors="surrogateescape"))
        os.fchown(file.fileno(), *wanted[:2])
        os.fchmod(file.fileno(), wanted[2])
    try:
        if entry["validate"]:
            run(entry["validate"].replace("%s", new), f"{path} is invalid")
        add_pending(entry)
        os.rename(new, path)
    finally:
        if os.path.exists(new):
            os.unlink(new)
    return True, before


def add_pending(entry):
    os.makedirs(PENDING, mode=0o700, exist_ok=True)
    for command in entry["on_change"]:
        with open(record(command), "w") as file:
            file.write(command)


def run(command, problem):
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{problem}: {command}: {(done.stderr or done.stdout).strip()}")


def pending(entries):
    """Commands whose file changed now or in an interrupted run, in the order of the role."""
    listed = dict.fromkeys(command for entry in entries for command in entry["on_change"])
    return [command for command in listed if os.path.exists(record(command))]


def main():
    job = json.loads(DATA)  # noqa: F821 (node_files.py defines DATA in front of this script)
    changed, diff = [], []
    for entry in job["files"]:
        differs, before = put(entry, job["check"])
        if differs:
            changed.append(entry["dest"])
            if not entry["secret"]:
                diff.append({"dest": entry["dest"], "before": before or "", "after": entry["content"] or ""})
    commands = [] if job["check"] else pending(job["files"])
    for command in commands:
        run(command, "command failed")
        os.unlink(record(command))
    print(json.dumps({"changed": bool(changed or commands), "files": changed, "ran": commands, "diff": diff}))


main()
