"""An environment of its own for the tests of a testbed, copied from inventories/ and removed at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.core import config
from cluster.core.state import State

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv/bin"


class Environment:
    def __init__(self, name: str, provider: str, folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.fail("this test boots nodes and needs root")
        self.name, self.provider, self.folder = name, provider, folder
        self.state = State(name)
        self.inventory = ROOT / "inventories" / name
        self.results = ROOT / "results" / name
        self.variables: dict[str, str] = dict(os.environ)

    def write_cluster_file(self, section: dict[str, Any], **values: Any) -> None:
        """Copy inventories/<provider> and change fields of cluster.yml and of its section <provider>."""
        shutil.rmtree(self.inventory, ignore_errors=True)
        shutil.copytree(ROOT / "inventories" / self.provider, self.inventory, symlinks=True)
        path = config.cluster_file(self.name)
        content = yaml.safe_load(path.read_text())["cluster"] | {"name": self.name, "nodes": 2, **values}
        content[self.provider] |= section
        path.write_text(yaml.safe_dump({"cluster": content}))

    def run(self, *words: str | Path, ok: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(word) for word in words],
            cwd=ROOT,
            env={**self.variables, **variables},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert not ok or done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *words: str | Path, **variables: str) -> subprocess.Popen[bytes]:
        argv = [str(word) for word in words]
        return subprocess.Popen(argv, cwd=ROOT, env={**self.variables, **variables}, stdout=subprocess.DEVNULL)

    def cluster(self, *words: str, ok: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run(BIN / "cluster", "--env", self.name, *words, ok=ok, **variables)

    def remove_files(self) -> None:
        for folder in (self.inventory, self.state.dir, self.results):
            shutil.rmtree(folder, ignore_errors=True)
