"""Fixtures of the command-line tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from project import REQUIRED, ROOT, Project, copy_project


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
