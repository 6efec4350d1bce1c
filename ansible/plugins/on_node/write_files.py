"""Runs on a node, as root, from standard input: bring files to what they should be, then run the commands that go with
those that changed. Prints one JSON object. Standard library only, and little of it: it starts N times per role.

A command that is due is noted in PENDING before its file is written and struck off when it has succeeded, so one that
an interruption kept from running is made up for next time.
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


def note(command):
    return os.path.join(PENDING, hashlib.sha256(command.encode()).hexdigest()[:16])


def put(entry, check):
    """Whether the file differs from what it should be; unless we only check, it no longer does afterwards."""
    path, content = entry["dest"], entry["content"]
    before = read(path)
    if content is None:
        if before is None:
            return False, before
        if not check:
            remember(entry)
            os.unlink(path)
        return True, before
    wanted = pwd.getpwnam(entry["owner"]).pw_uid, grp.getgrnam(entry["group"]).gr_gid, int(entry["mode"], 8)
    if before == content and attributes(path) == wanted:
        return False, before
    if check:
        return True, before
    new = f"{path}.new"
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content.encode(errors="surrogateescape"))
        os.fchown(file.fileno(), *wanted[:2])
        os.fchmod(file.fileno(), wanted[2])
    try:
        if entry["validate"]:
            run(entry["validate"].replace("%s", new), f"{path} is refused")
        remember(entry)
        os.rename(new, path)
    finally:
        if os.path.exists(new):
            os.unlink(new)
    return True, before


def remember(entry):
    os.makedirs(PENDING, mode=0o700, exist_ok=True)
    for command in entry["then"]:
        with open(note(command), "w") as file:
            file.write(command)


def run(command, what):
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{what}: {command}: {(done.stderr or done.stdout).strip()}")


def due(entries):
    """Commands whose file changed now or before an interruption, in the order in which the role names them."""
    named = dict.fromkeys(command for entry in entries for command in entry["then"])
    return [command for command in named if os.path.exists(note(command))]


def main():
    job = json.loads(DATA)  # noqa: F821 (what sends this script puts DATA in front of it)
    changed, diff = [], []
    for entry in job["files"]:
        differs, before = put(entry, job["check"])
        if differs:
            changed.append(entry["dest"])
            if not entry["secret"]:
                diff.append({"dest": entry["dest"], "before": before or "", "after": entry["content"] or ""})
    commands = [] if job["check"] else due(job["files"])
    for command in commands:
        run(command, "failed")
        os.unlink(note(command))
    print(json.dumps({"changed": bool(changed or commands), "files": changed, "ran": commands, "diff": diff}))


main()
