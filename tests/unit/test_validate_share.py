"""Validation of the share, with a stand-in for mpirun that runs each rank on this machine."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from cluster.core.config import ROOT
from cluster.core.sections import Storage

# With BLIND set, rank 1 does not see the share: it reads another folder, which is empty.
MPIRUN = """#!/bin/sh
shift 4
for OMPI_COMM_WORLD_RANK in 0 1; do
  export OMPI_COMM_WORLD_RANK
  script=$1
  [ "$OMPI_COMM_WORLD_RANK$BLIND" = 1yes ] && script=$(echo "$script" | sed "s,^sudo.*file=,file=/nowhere,")
  sh -c "$script" "$2"
done
"""
HELLO = """#!/bin/sh
[ "$OMPI_COMM_WORLD_RANK" = 0 ] && echo '{"ranks": 2, "sum": 1, "wrong": 0, "gbps": [RATE, RATE]}'
"""


@pytest.fixture
def validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    spec = importlib.util.spec_from_file_location("validate_cluster", ROOT / "ansible/files/validate_cluster.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "unreachable", lambda nodes, port: [])
    monkeypatch.setattr(module, "SHARE_TIMEOUT", 1)
    monkeypatch.setattr(module, "CURRENT", tmp_path / "current")
    monkeypatch.setattr(module, "READ_SHARE", module.READ_SHARE.replace("+ 60", "+ 1"))
    rate = 1 / module.wire_overhead("lo")
    programs = {"mpirun": MPIRUN, "mpi-hello": HELLO.replace("RATE", f"{rate:.4f}"), "sudo": "#!/bin/sh\n"}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def run(share: Path | None) -> tuple[dict, str]:
        words = ["--nodes", "head,w1", "--fabric", "1g", "--interface", "lo", "--rate-gbps", "1"]
        monkeypatch.setattr(sys, "argv", ["validate", *words, *(["--share", str(share)] if share else [])])
        problem = ""
        try:
            module.main()
        except SystemExit as error:
            problem = str(error)
        return json.loads(capsys.readouterr().out), problem

    return run


@pytest.fixture
def share(tmp_path: Path) -> Path:
    (tmp_path / "share/results").mkdir(parents=True)
    return tmp_path / "share"


def test_share_passes_if_every_node_reads_it(validate, share):
    result, problem = validate(share)
    assert (result["ok"], problem) == (True, "")
    assert result["share"] == {"path": str(share), "read_on": ["head", "w1"]}
    assert list((share / "results").iterdir()) == []


def test_node_that_does_not_see_the_share_is_named(validate, share, monkeypatch):
    monkeypatch.setenv("BLIND", "yes")
    result, problem = validate(share)
    assert not result["ok"]
    assert result["share"]["read_on"] == ["head"]
    assert problem.startswith(f"w1: {share}: cannot read the file that the head wrote")
    assert list((share / "results").iterdir()) == []


def test_missing_share_is_named(validate, tmp_path):
    result, problem = validate(tmp_path / "none")
    assert result["share"]["read_on"] == []
    assert "share: " in problem
    assert "No such file or directory" in problem


def test_cluster_without_a_share_passes(validate):
    result, _ = validate(None)
    assert result["ok"]
    assert result["share"] is None


def test_share_cannot_hide_a_folder_of_a_role():
    """`storage.path: /opt/horovod` hid Horovod, and the deploy called the cluster validated."""
    text = "".join(path.read_text() for path in ROOT.glob("roles/*/defaults/main.yml"))
    text += (ROOT / "cluster/core/layout.yml").read_text()
    used = set(re.findall(r"(?:/opt|/srv|/var)/[\w-]+", text))
    assert "/opt/horovod" in used
    for folder in used:
        with pytest.raises(ValueError, match=r"hide|system"):
            Storage(path=folder)
    assert Storage(path="/opt/shared").path == "/opt/shared"
