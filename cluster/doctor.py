"""What is missing on this machine or broken in the cluster, and the command that fixes it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

from rich.console import Console

from cluster import config, lifecycle
from cluster.errors import InfraError, UserError
from cluster.state import State, terraform_binary, terraform_version
from cluster.terraform import read_output

TOOLS = {"podman": "podman", "runc": "runc", "mmdebstrap": "mmdebstrap", "ssh": "openssh-client", "nft": "nftables"}
DISK_GB = 12


def checks(env: str) -> list[dict[str, str | bool]]:
    """Each check: name, ok, detail, fix. A bad cluster.yml raises UserError, as everywhere."""
    cluster = config.load(env)
    state = State(env)
    found: list[dict[str, str | bool]] = []

    def add(name: str, ok: bool, detail: str, fix: str) -> None:
        found.append({"name": name, "ok": ok, "detail": detail, "fix": "" if ok else fix})

    add("cluster.yml", True, f"{cluster.nodes} nodes, provider {cluster.provider}", "")
    if cluster.provider == "local":
        for tool, package in TOOLS.items():
            path = shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")
            add(tool, bool(path), path or "not found", f"apt-get install {package}")
        root = os.geteuid() == 0 or subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0
        add("root", root, "root or sudo without a password" if root else "neither root nor sudo", "run as root")
    version = terraform_version(str(terraform_binary()))
    add("terraform", version >= (1, 7), ".".join(map(str, version)), "make setup")
    free = shutil.disk_usage(config.ROOT).free / 1e9
    add("disk", free > DISK_GB, f"{free:.0f} GB free", f"free {DISK_GB} GB")
    if state.tfstate.exists():
        try:
            contract = read_output(state)
            real = lifecycle.real_states(state, cluster)
            answers = lifecycle.ping(state)
            for name, _ in contract.ordered():
                current = real.get(name, {}).get("state", "missing")
                ok = current == "running" and answers[name]
                detail = current if current != "running" or ok else "running, but a role's service is not"
                add(f"node {name}", ok, detail, f"make deploy ENV={env}")
        except InfraError as error:
            add("deployment", False, str(error), f"make deploy ENV={env}")
    return found


def run(env: str, as_json: bool) -> int:
    try:
        found = checks(env)
    except UserError as error:
        if as_json:
            print(json.dumps({"ok": False, "failures": [{"name": "cluster.yml", "detail": str(error)}]}, indent=1))
        raise
    failures = [check for check in found if not check["ok"]]
    if as_json:
        print(json.dumps({"ok": not failures, "failures": failures, "checks": found}, indent=1))
    else:
        console = Console(highlight=False)
        for check in found:
            mark = "ok  " if check["ok"] else "FAIL"
            console.print(f"{mark} {check['name']}: {check['detail']}", markup=False)
            if check["fix"]:
                console.print(f"     fix: {check['fix']}", markup=False)
    return 1 if failures else 0
