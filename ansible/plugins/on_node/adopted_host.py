"""Runs as root on a machine that existed before the cluster: notes how it was, what a deploy changes, and undoes that.

    adopted_host.py look ACCOUNT             print, as JSON, the training account, ids that are taken, what others use
    adopted_host.py begin ACCOUNT SHARE      before the first deploy: save how the machine is; SHARE will be a mount
    adopted_host.py note ACCOUNT CHANGES     after a deploy: add its changes, as JSON
    adopted_host.py release ACCOUNT          undo all changes; print what was done and what stays, as JSON

Standard library only.
"""

import fnmatch
import grp
import hashlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

OWN = Path("/var/lib/horovod-cluster")
KEPT = OWN / "original"
STATE, CHANGES, FILES = KEPT / "state.json", KEPT / "changes.json", KEPT / "files.tar.gz"
# What was installed when a deploy began that has noted nothing yet. Between deploys others install packages too.
INSTALLED = KEPT / "installed.json"
# write_files.py adds the files that it writes, and saves those of packages that came later.
WRITTEN, OF_PACKAGES = KEPT / "written", KEPT / "packages"
SAVED = ("/etc", "/usr/local/bin", "/usr/local/sbin")
LARGEST = 10_000_000
# Made by commands of the roles and by bench. What was there before the cluster stays.
CREATED = (
    *("/etc/horovod-cluster", "/opt/bench-worker", "/opt/horovod", "/opt/jupyterlab", "/opt/nccl", "/opt/nccl-tests"),
    *("/usr/local/bin/mpi-hello", "/usr/local/src/mpi-hello.c", "/var/cache/wheelhouse", "/var/cache/horovod-cluster"),
)
# Perhaps the only copy of somebody's work.
DATA = ("/srv/data", "/srv/share")
SYSCTLS = (
    *("net.core.rmem_max", "net.core.wmem_max", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"),
    *("net.ipv4.tcp_slow_start_after_idle", "net.ipv4.tcp_congestion_control"),
)
ACCOUNT_FILES = ("passwd", "group", "shadow", "gshadow", "subuid", "subgid")
# Field of cluster.yml -> the units that its role would give other settings.
UNITS = {
    "features.data": ("nginx.service",),
    "features.monitoring": ("prometheus.service", "prometheus-node-exporter.service"),
    "features.slurm": ("slurmctld.service", "slurmd.service"),
}
VOLUMES, EXPORTS = Path("/var/lib/glusterd/vols"), Path("/var/lib/nfs/etab")
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "lustre", "gpfs", "beegfs", "ceph", "autofs", "fuse.glusterfs")
FIRST_ID, IDS = 1500, 100


def run(*argv, check=False):
    done = subprocess.run(argv, capture_output=True, text=True)
    if check and done.returncode:
        sys.exit(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def look(account):
    """Numbers of accounts and groups also come from LDAP and the like, so each is asked for."""
    ids = range(FIRST_ID, FIRST_ID + IDS)
    taken = {one for one in ids if answers(pwd.getpwuid, one) or answers(grp.getgrgid, one)}
    there = answers(pwd.getpwnam, account)
    if there:
        taken.discard(there.pw_uid)
        home = there.pw_dir
    else:
        home = f"{OWN}-home" if on_network("/home") else f"/home/{account}"
    return {
        **{"uid": there.pw_uid if there else None, "home": home, "taken": sorted(taken)},
        **{"shared_home": bool(there) and on_network(home), "others": others(), "refused_by": refused_by(account)},
    }


def refused_by(account):
    """The option of the SSH server that does not let the account log in; "" if there is none."""
    settings = [line.split(None, 1) for line in run("sshd", "-T").splitlines() if " " in line]

    def named(option, names):
        patterns = [value.partition("@")[0] for key, value in settings if key == option]
        return patterns, any(fnmatch.fnmatch(name, pattern) for name in names for pattern in patterns)

    groups = {account} | {one.gr_name for one in grp.getgrall() if account in one.gr_mem}
    for option, names in (("AllowUsers", {account}), ("AllowGroups", groups)):
        patterns, found = named(option.lower(), names)
        if patterns and not found:
            return option
    for option, names in (("DenyUsers", {account}), ("DenyGroups", groups)):
        if named(option.lower(), names)[1]:
            return option
    return ""


def others():
    """Field of cluster.yml -> what somebody else uses here and its role would change. {} where we have deployed."""
    if STATE.exists() or os.path.exists("/etc/horovod-cluster"):
        return {}
    active = active_units()
    found = {field: [unit for unit in units if unit in active] for field, units in UNITS.items()}
    if VOLUMES.is_dir():
        found["storage.backend: glusterfs"] = [f"the GlusterFS volume {one.name}" for one in VOLUMES.iterdir()]
    if EXPORTS.exists():
        found["storage.backend: nfs"] = [
            f"the NFS export {line.split()[0]}" for line in EXPORTS.read_text().splitlines()
        ]
    return {field: ", ".join(names) for field, names in found.items() if names}


def answers(ask, key):
    try:
        return ask(key)
    except KeyError:
        return None


def on_network(path):
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return any(kind in NETWORK_FILE_SYSTEMS for kind in run("findmnt", "-n", "-o", "FSTYPE", "-T", path).split())


def packages():
    shown = run("dpkg-query", "-W", "-f", "${db:Status-Abbrev}\t${Package}\n", check=True)
    return sorted({line.split("\t")[1] for line in shown.splitlines() if line.startswith("ii")})


def unit_files():
    lines = run("systemctl", "list-unit-files", "--no-legend", "--plain", check=True).splitlines()
    return {line.split()[0]: line.split()[1] for line in lines if len(line.split()) > 1}


def active_units():
    shown = run("systemctl", "list-units", "--state=active", "--no-legend", "--plain", check=True)
    return sorted(line.split()[0] for line in shown.splitlines())


def sysctls():
    paths = {name: Path("/proc/sys", *name.split(".")) for name in SYSCTLS}
    return {name: path.read_text().strip() for name, path in paths.items() if path.exists()}


def begin(account, share):
    KEPT.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not INSTALLED.exists():
        write(INSTALLED, packages())
    if STATE.exists():
        return
    with tarfile.open(FILES, "w:gz") as tar:
        for folder in SAVED:
            tar.add(folder, filter=lambda one: one if one.size <= LARGEST else None)
    FILES.chmod(0o600)
    state = {
        **{"units": unit_files(), "active": active_units(), "sysctls": sysctls()},
        "account": answers(pwd.getpwnam, account) is not None,
        "existed": [path for path in (*CREATED, *DATA) if os.path.lexists(path)],
        "mount_point": "" if os.path.lexists(share) else share,
    }
    write(STATE, state)


def write(path, value):
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value))
    os.replace(new, path)


def read(path):
    return json.loads(path.read_text()) if path.exists() else {}


def digest(path):
    """None for what is not a file: a folder or nothing."""
    if os.path.islink(path):
        return os.readlink(path)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if os.path.isfile(path) else None


def note(new):
    """Remember the digest of each changed file: what somebody else changes later is not undone."""
    if not STATE.exists():
        return
    found = read(CHANGES)
    written = WRITTEN.read_text().splitlines() if WRITTEN.exists() else []
    paths = sorted({*found.get("files", {}), *new.get("files", []), *written})
    units = sorted({*found.get("units", []), *new.get("units", [])})
    files = {path: digest(path) for path in paths}
    write(CHANGES, {"files": files, "units": units, "packages": came(found.get("packages", []))})
    INSTALLED.unlink(missing_ok=True)


def came(known):
    """The packages of all deploys, with those of one that has noted nothing."""
    new = set(packages()) - set(read(INSTALLED)) if INSTALLED.exists() else set()
    return sorted({*known, *new})


def release(account):
    if not STATE.exists():
        return {"known": False}
    # A deploy that ended early has noted nothing.
    state, changes = read(STATE), {"files": {}, "units": [], "packages": []} | read(CHANGES)
    left = [path for path in DATA if os.path.exists(path) and path not in state["existed"]]
    said = {"known": True, "kept": [], "left": left}
    added = came(changes["packages"])
    stop_ours(changes["files"])
    with tarfile.open(FILES) as tar:
        members = {f"/{one.name}": one for one in tar.getmembers()}
        for path in sorted(changes["files"], reverse=True):
            undo(path, changes["files"][path], tar, members, said["kept"])
        for path in CREATED:
            if path not in state["existed"]:
                remove(path)
        remove_mount_point(state["mount_point"])
        if not state["account"]:
            remove_account(account)
        for name in ACCOUNT_FILES:
            restore_backup(f"/etc/{name}", tar, members)
    run("systemctl", "daemon-reload")
    restore_units(state, [*changes["units"], *with_drop_ins(changes["files"])], added)
    for name, value in state["sysctls"].items():
        run("sysctl", "--quiet", "--write", f"{name}={value}")
    # A server that loads its settings again refuses connections for a moment.
    if any(path.startswith("/etc/ssh/sshd_config") for path in changes["files"]):
        reload_ssh(state["active"])
    shutil.rmtree(OWN)
    return {**said, "packages": added}


def reload_ssh(active):
    os.makedirs("/run/sshd", exist_ok=True)
    run("sshd", "-t", check=True)
    if "ssh.socket" not in active:
        run("systemctl", "reload", "ssh.service")
    elif "ssh.service" in active:
        run("systemctl", "restart", "ssh.service")


def stop_ours(files):
    # The server of the share is named, so the names go last.
    for command, word in (("shared-storage", "forget"), ("fabric-rate", "off"), ("cluster-hosts", "restore")):
        if os.path.exists(f"/usr/local/sbin/{command}"):
            run(f"/usr/local/sbin/{command}", word)
    for path in files:
        if os.path.dirname(path) == "/etc/systemd/system" and os.path.isfile(path):
            run("systemctl", "disable", "--now", os.path.basename(path))


def undo(path, ours, tar, members, kept):
    now = digest(path)
    if now is not None and now != ours:
        # A release that was interrupted has restored it already.
        if now != original(path, tar, members):
            kept.append(path)
    elif path in members and not members[path].isdir():
        restore(path, tar, members)
    elif (OF_PACKAGES / path.lstrip("/")).exists():
        shutil.copy2(OF_PACKAGES / path.lstrip("/"), path)
    elif now is not None:
        os.unlink(path)
    elif os.path.isdir(path) and path not in members and not os.listdir(path):
        os.rmdir(path)


def original(path, tar, members):
    """As `digest` says it."""
    one = members.get(path)
    if one and one.issym():
        return one.linkname
    return hashlib.sha256(tar.extractfile(one).read()).hexdigest() if one and one.isfile() else None


def restore(path, tar, members):
    if digest(path) is not None:
        os.unlink(path)
    tar.extract(members[path], "/", numeric_owner=True)


def restore_backup(path, tar, members):
    """The copy that useradd and userdel make, if the file itself is as it was."""
    if path in members and tar.extractfile(members[path]).read() == Path(path).read_bytes():
        backup = f"{path}-"
        if backup in members:
            restore(backup, tar, members)
        elif os.path.exists(backup):
            os.unlink(backup)


def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def remove_account(name):
    """userdel refuses while a process of the account is there, and a killed one takes a moment to go."""
    for _ in range(40):
        if not answers(pwd.getpwnam, name):
            return
        run("pkill", "-KILL", "-u", name)
        run("userdel", "--remove", name)
        time.sleep(0.1)
    run("userdel", "--remove", name, check=True)


def remove_mount_point(path):
    """What is not empty has data, or is still mounted."""
    if path and os.path.isdir(path) and not os.path.ismount(path) and not os.listdir(path):
        os.rmdir(path)


def with_drop_ins(files):
    """Units of others to which we gave settings. They must run without them."""
    folders = {os.path.dirname(path) for path in files if path.startswith("/etc/systemd/system/")}
    return [os.path.basename(folder).removesuffix(".d") for folder in folders if folder.endswith(".d")]


def restore_units(state, changed, added):
    """Units that roles changed get their state back; those of packages that came with the cluster are switched off."""
    listed = run("dpkg-query", "--listfiles", *added).splitlines() if added else []
    theirs = {os.path.basename(path) for path in listed if "/systemd/system/" in path}
    now = unit_files()
    for unit in sorted({*changed, *theirs} & now.keys()):
        before = state["units"].get(unit)
        if before == "enabled" and now[unit] != "enabled":
            run("systemctl", "enable", unit)
        elif before != "enabled" and now[unit] == "enabled":
            run("systemctl", "disable", unit)
        if unit in state["active"]:
            run("systemctl", "restart", unit)
        elif before is None or unit in changed:
            run("systemctl", "stop", unit)


def main(argv):
    action, account = argv[:2]
    if action == "look":
        print(json.dumps(look(account)))
    elif action == "begin":
        begin(account, argv[2])
    elif action == "note":
        note(json.loads(argv[2]))
    elif action == "release":
        print(json.dumps(release(account)))


main(sys.argv[1:])
