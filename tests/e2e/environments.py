"""Environments of the end-to-end tests: copies of inventories/local with other names and subnets."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import yaml

from cluster.providers.local.provider import look_here

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv/bin"


def make_env(name: str, second: int, nodes: int) -> Path:
    """A copy of inventories/local with another name and other subnets."""
    folder = ROOT / "inventories" / name
    shutil.copytree(ROOT / "inventories/local", folder, symlinks=True)
    path = folder / "group_vars/all/cluster.yml"
    content = yaml.safe_load(path.read_text())
    content["cluster"] |= {
        "name": name,
        "nodes": nodes,
        "networks": {"management": f"10.{second}.0.0/24", "fabric": f"10.{second}.1.0/24"},
        "admin_cidrs": [f"10.{second}.0.1/32"],
    }
    path.write_text(yaml.safe_dump(content))
    return folder


def run(*argv: str | Path, ok: bool = True, timeout: int = 1200) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(word) for word in argv], cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    if ok:
        assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done


def cluster(*words: str, env: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
    return run(BIN / "cluster", "--env", env, *words, ok=ok)


def podman(*words: str) -> str:
    return run("podman", *words, ok=False).stdout.strip()


def leftovers(name: str) -> list[str]:
    """What still exists of an environment: containers, networks, state, processes."""
    found = podman("ps", "-a", "--format={{.Names}}", f"--filter=label=horovod-cluster={name}").split()
    # With the settings of this project: podman's default backend may know other networks.
    found += [network.name for network in look_here().networks if network.cluster == name]
    found += [str(ROOT / ".state" / name)] if (ROOT / ".state" / name).exists() else []
    found += [line for line in run("nft", "list", "tables").stdout.splitlines() if line.endswith(f"_{name}")]
    marker = f"HOROVOD_CLUSTER_STATE={ROOT / '.state' / name}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker in entry.read_bytes().split(b"\0"):
                found.append(f"process {entry.parent.name}")
        except OSError:
            continue
    return found


def remove(*names: str) -> None:
    for name in names:
        if (ROOT / "inventories" / name).exists():
            cluster("destroy", "--yes", env=name, ok=False)
            shutil.rmtree(ROOT / "inventories" / name)
        shutil.rmtree(ROOT / "results" / name, ignore_errors=True)


def contract(env: str) -> dict:
    return json.loads(run(ROOT / f"inventories/{env}/terraform.py").stdout)
