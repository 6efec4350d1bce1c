"""Fixtures of the command-line tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from project import REQUIRED, ROOT, Project, copy_project

# The stand-ins are shared with other tests.
sys.path.insert(0, str(ROOT / "tests"))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(copy_project(tmp_path / "project"), tmp_path)
    (made.folder / ".venv").symlink_to(ROOT / ".venv")
    made.variables.mkdir(parents=True)
    (made.variables / "cluster.yml").write_text(json.dumps({"cluster": REQUIRED}))
    return made


@pytest.fixture
def deployed(project: Project) -> Project:
    project.deploy()
    return project
