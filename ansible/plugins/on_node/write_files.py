"""Runs on a node as root, from standard input: writes files, then runs the commands of the files that changed.

Commands of a file that must be confirmed do not run: they are listed as `due`, and a second call runs them.

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
# On machines that existed before the cluster, adopted_host.py makes this folder and undoes the changes.
ORIGINAL = "/var/lib/horovod-cluster/original"


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
            note(path, before)
            add_pending(entry)
            os.unlink(path)
        return True, before
    try:
        wanted = pwd.getpwnam(entry["owner"]).pw_uid, grp.getgrnam(entry["group"]).gr_gid, int(entry["mode"], 8)
    except KeyError:
        # A check before the first deploy: the account does not exist yet.
        if check:
            return True, before
        raise
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
        note(path, before)
        add_pending(entry)
        os.rename(new, path)
    finally:
        if os.path.exists(new):
            os.unlink(new)
    return True, before


def note(path, before):
    """Remember that we write this file, and save the file of a package: it may have come after the first deploy."""
    if not os.path.isdir(ORIGINAL):
        return
    written = os.path.join(ORIGINAL, "written")
    if path in (read(written) or "").splitlines():
        return
    saved = os.path.join(ORIGINAL, "packages", path.lstrip("/"))
    if before is not None and not os.path.exists(saved) and is_of_package(path):
        os.makedirs(os.path.dirname(saved), exist_ok=True)
        subprocess.run(["cp", "--archive", path, saved], check=True)
    with open(written, "a") as out:
        out.write(f"{path}\n")


def is_of_package(path):
    lists = "/var/lib/dpkg/info"
    return any(
        path in (read(os.path.join(lists, name)) or "").splitlines()
        for name in os.listdir(lists)
        if name.endswith(".conffiles")
    )


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
    if "run" in job:
        for command in job["run"]:
            run(command, "command failed")
            os.unlink(record(command))
        print("{}")
        return
    changed, diff = [], []
    for entry in job["files"]:
        differs, before = put(entry, job["check"])
        if differs:
            changed.append(entry["dest"])
            if not entry["secret"]:
                diff.append({"dest": entry["dest"], "before": before or "", "after": entry["content"] or ""})
    waiting = [] if job["check"] else pending([entry for entry in job["files"] if entry["confirmed"]])
    commands = [] if job["check"] else pending([entry for entry in job["files"] if not entry["confirmed"]])
    for command in commands:
        run(command, "command failed")
        os.unlink(record(command))
    ran = bool(changed or commands or waiting)
    print(json.dumps({"changed": ran, "files": changed, "ran": commands, "due": waiting, "diff": diff}))


main()
