"""checkov on terraform/: every finding is in waivers.yml with a reason.

checkov pins old versions of our dependencies, so it has its own virtual environment in the cache, one per lock file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.core.config import ROOT
from cluster.core.state import CACHE

LOCK = ROOT / "requirements/checkov.lock"
WAIVERS = Path(__file__).parent / "waivers.yml"
pytestmark = pytest.mark.timeout(900)
WORLD_OPEN = """
resource "aws_security_group" "open" {
  ingress {
    from_port   = 22
    to_port     = 22
    protocol    = "tcp"
    cidr_blocks = ["0.0.0.0/0"]
  }
}
"""


@pytest.fixture(scope="module")
def checkov() -> Path:
    folder = CACHE / f"checkov-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "checkov.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            uv = Path(sys.executable).parent / "uv"
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
            install = [
                uv,
                "pip",
                "install",
                "--quiet",
                "--python",
                folder / "bin/python",
                "--require-hashes",
                "-r",
                LOCK,
            ]
            done = subprocess.run(install, capture_output=True, text=True)
            assert done.returncode == 0, f"uv pip install checkov: {done.stderr[-2000:]}"
            (folder / ".complete").touch()
    return folder / "bin/checkov"


def findings(checkov: Path, folder: Path) -> tuple[list[tuple[str, str, str]], int]:
    """(check, resource, description) of every failed check, and the number of passed checks."""
    flags = ["--framework", "terraform", "--skip-download", "--quiet", "--compact", "--output", "json"]
    done = subprocess.run([checkov, "-d", folder, *flags], capture_output=True, text=True, timeout=600)
    result: dict[str, Any] = json.loads(done.stdout)
    failed = [
        (one["check_id"], one["resource"].partition("[")[0], one["check_name"])
        for one in result["results"]["failed_checks"]
    ]
    return sorted(set(failed)), int(result["summary"]["passed"])


def test_every_finding_is_waived_with_a_reason(checkov):
    waived: dict[str, dict[str, str]] = yaml.safe_load(WAIVERS.read_text())
    failed, passed = findings(checkov, ROOT / "terraform")
    assert passed > 20, "checkov checked hardly anything"
    new = [f"{check} {resource}: {text}" for check, resource, text in failed if resource not in waived.get(check, {})]
    assert not new, "\n".join(new)
    found = {(check, resource) for check, resource, _ in failed}
    stale = [
        f"{check} {resource}" for check, named in waived.items() for resource in named if (check, resource) not in found
    ]
    assert not stale, f"unused waivers: {stale}"
    assert all(len(reason) > 20 for named in waived.values() for reason in named.values())


def test_checkov_finds_an_open_port(checkov, tmp_path):
    (tmp_path / "main.tf").write_text(WORLD_OPEN)
    assert "CKV_AWS_24" in [check for check, _, _ in findings(checkov, tmp_path)[0]]
