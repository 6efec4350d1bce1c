"""A copy of the project to run commands on: an environment, a deployed state and a stand-in for ssh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv/bin"
RUNS = ROOT / "tests/fixtures/runs"
ENV = "cli"
# Linux: MAX_ARG_STRLEN, with the NUL that ends an argument.
LONGEST_ARGUMENT = 131_072
# Every field of cluster.yml that has no default.
REQUIRED = {
    "name": ENV,
    "provider": "local",
    "nodes": 2,
    "networks": {"management": "10.99.0.0/24", "fabric": "10.99.1.0/24"},
    "admin_cidrs": ["10.99.0.1/32"],
    "fabrics": {"1g": {"rate_gbps": 1}},
    "active_fabric": "1g",
}
PREDICT = ["predict", "--gpu", "v100", "--gpus", "8", "--gpus-per-node", "4", "--rate-gbps", "10", "--json"]
# The sweep keeps a launch's standard input open, so the stand-in reads until nothing has come for a second.
SSH = """#!{python} -IS
import json, os, select, sys
given = b""
while select.select([0], [], [], 1.0)[0] and (more := os.read(0, 1 << 16)):
    given += more
name = f"{calls}/{{os.getpid()}}"
with open(name, "w") as file:
    json.dump({{"argv": sys.argv, "stdin": given.decode("latin-1")}}, file)
os.rename(name, name + ".json")
"""
pytestmark = pytest.mark.timeout(120)


def run(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**inherited, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return f"exit {done.returncode}: {lines[-1] if lines else 'no output'}"


def copy_project(target: Path) -> Path:
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        if not os.path.lexists(ROOT / name):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@dataclass
class Project:
    """A copy of the project with one environment. `bench` and `cluster` are the copy's, from the project's own venv."""

    folder: Path
    tmp: Path

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.tmp / 'bin'}:{os.environ['PATH']}"
        code = f"{self.folder}:{self.folder / 'src'}"
        # A sweep elsewhere on this machine must not make our commands wait.
        return {"PATH": path, "PYTHONPATH": code, "HOROVOD_CLUSTER_MACHINE_LOCK": str(self.tmp / "machine.lock")}

    def run(self, command: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return run(BIN / command, *words, cwd=self.folder, **self.environment)

    @property
    def variables(self) -> Path:
        return self.folder / "inventories" / ENV / "group_vars/all"

    @property
    def results(self) -> Path:
        return self.folder / "results" / ENV / "plan"

    def deploy(self) -> None:
        """Leave what a deploy leaves: a Terraform state. And put the stand-in for ssh in front of PATH."""
        state = self.folder / ".state" / ENV
        state.mkdir(parents=True)
        value = contract(state)
        content = {
            **{"version": 4, "terraform_version": "1.7.0", "serial": 1, "lineage": ENV, "resources": []},
            "outputs": {"cluster": {"value": value, "type": terraform_type(value)}},
        }
        (state / "terraform.tfstate").write_text(json.dumps(content))
        for name in ("bin", "calls"):
            (self.tmp / name).mkdir()
        ssh = self.tmp / "bin/ssh"
        ssh.write_text(SSH.format(python=sys.executable, calls=self.tmp / "calls"))
        ssh.chmod(0o755)

    def set_storage(self, backend: str) -> None:
        """As if the cluster had been deployed with this storage.backend."""
        path = self.folder / ".state" / ENV / "terraform.tfstate"
        content = json.loads(path.read_text())
        content["outputs"]["cluster"]["value"]["storage"]["backend"] = backend
        path.write_text(json.dumps(content))

    def calls(self) -> list[dict[str, Any]]:
        """Every call of ssh: its arguments and its standard input."""
        return [json.loads(path.read_text()) for path in (self.tmp / "calls").glob("*.json")]

    def sweep(self, **changes: Any) -> subprocess.CompletedProcess[str]:
        plan = {"nodes": [2], "batches": [32], "fabrics": ["1g"], "engines": ["horovod-mpi"], **changes}
        (self.tmp / "plan.yml").write_text(json.dumps(plan))
        return self.run("bench", "sweep", "--env", ENV, "--plan", self.tmp / "plan.yml", "--json")

    def trials(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.results / "trials.jsonl").read_text().splitlines()]


def contract(state: Path) -> dict[str, Any]:
    """Terraform's output for two nodes of provider local on a shaped fabric."""
    nodes = {
        name: {
            **{"index": index, "role": role, "management_address": f"10.99.0.{10 + index}"},
            **{"fabric_addresses": {"1g": f"10.99.1.{10 + index}"}, "gpus": 0, "gpu_model": "none"},
        }
        for index, (name, role) in enumerate({"head": "head", "w1": "worker"}.items())
    }
    fabric = {"interface": "fabric0", "subnet": "10.99.1.0/24", "rate_gbps": 1, "transport": "tcp", "shaped": True}
    return {
        **{"name": ENV, "provider": "local", "active_fabric": "1g", "nodes": nodes, "fabrics": {"1g": fabric}},
        "ssh": {"user": "ops", "key": str(state / "id"), "known_hosts": str(state / "known_hosts"), "jump_host": None},
        "storage": {"backend": "none", "server": "head", "path": "/shared"},
    }


def terraform_type(value: Any) -> Any:
    if isinstance(value, dict):
        return ["object", {name: terraform_type(inner) for name, inner in value.items()}]
    return "bool" if isinstance(value, bool) else "number" if isinstance(value, int) else "string"
