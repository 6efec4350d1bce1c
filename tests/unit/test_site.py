"""What ansible/site.yml takes a node for, before it installs or skips roles."""

from __future__ import annotations

import json
import subprocess

import jinja2
import pytest
import yaml

from cluster.core.config import ROOT


@pytest.fixture
def node(tmp_path):
    """Runs the question that site.yml asks a node, in a folder that stands for /."""
    plays = yaml.safe_load((ROOT / "ansible/site.yml").read_text())
    (task,) = [
        task for play in plays for task in play.get("tasks", []) if task["name"] == "Read what is installed on a node"
    ]
    for path in ("venv/bin/horovodrun", "bin/modinfo"):
        file = tmp_path / path
        file.parent.mkdir(parents=True)
        file.write_text("#!/bin/sh\nexit 0\n")
        file.chmod(0o755)
    (tmp_path / "installed.json").write_text('{"key": "abc", "roles": ["common", "nvidia_driver"]}\n')

    def ask(gpus: int, roles: tuple[str, ...] = ("common", "nvidia_driver")) -> dict[str, object]:
        given = {"node_gpus": gpus, "cluster_roles": roles, "layout": {"venv": str(tmp_path / "venv")}, **task["vars"]}
        command = jinja2.Template(task["ansible.builtin.raw"]).render(given)
        command = command.replace("/etc/horovod-cluster", str(tmp_path)).replace("/usr/sbin", str(tmp_path / "bin"))
        return json.loads(subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout)

    ask.folder = tmp_path
    return ask


def test_node_with_everything_keeps_its_key(node):
    assert node(1) == node(0) == {"key": "abc", "roles": ["common", "nvidia_driver"]}


def test_gpu_node_whose_kernel_has_no_driver_is_installed_again(node):
    (node.folder / "bin/modinfo").write_text("#!/bin/sh\nexit 1\n")
    assert node(1) == {"key": "no driver, abc", "roles": ["common", "nvidia_driver"]}
    assert node(0)["key"] == node(1, roles=("common",))["key"] == "abc"


def test_node_that_lost_horovod_is_known(node):
    (node.folder / "venv/bin/horovodrun").unlink()
    assert node(1) == {"key": "lost", "roles": []}


def test_new_node_has_nothing(node):
    (node.folder / "installed.json").unlink()
    assert node(1) == {"key": "", "roles": []}
