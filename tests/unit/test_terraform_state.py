"""Terraform's state outlives the code that wrote it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.terraform import rename_tools


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/v/bin/python /p/terraform/local/node.py", "/v/bin/python -m cluster.providers.local.node"),
        ("/v/bin/python -m cluster.gpulab.deployment", "/v/bin/python -m cluster.providers.gpulab.deployment"),
        (
            "/v/bin/python -m cluster.virtualwall.experiment",
            "/v/bin/python -m cluster.providers.virtualwall.experiment",
        ),
    ],
)
def test_commands_of_earlier_versions_are_renamed_and_exist(tmp_path: Path, old: str, new: str) -> None:
    state = tmp_path / "terraform.tfstate"
    state.write_text(json.dumps({"resources": [{"input": {"value": {"tool": old, "name": "w1"}}}]}))
    rename_tools(state)
    (resource,) = json.loads(state.read_text())["resources"]
    assert resource["input"]["value"] == {"tool": new, "name": "w1"}
    before = state.stat().st_mtime_ns
    rename_tools(state)
    assert state.stat().st_mtime_ns == before
    module = new.split()[-1]
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is None)"
    assert subprocess.run([sys.executable, "-c", find], env=dict(os.environ)).returncode == 0
