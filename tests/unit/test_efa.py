"""Transport efa runs where the machine image has its software, and is refused in one line elsewhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from test_fit import cluster

from bench.plan import check
from bench.plan.schema import Plan
from bench.sweep import efa
from cluster.core.contract import Contract
from cluster.core.errors import UserError

PROGRAMS = {
    "fi_info": "provider: efa",
    "ldconfig": "libnccl-net.so (libc6,x86-64) => /opt/amazon/ofi-nccl/lib/libnccl-net.so",
    "ompi_info": "  MCA mtl: ofi (MCA v2.1.0, API v2.0.0, Component v4.1.4)",
}


def on_efa(*gpus: int) -> Contract:
    there = cluster(*gpus)
    there.fabrics["fast"] = next(iter(there.fabrics.values())).model_copy(update={"transport": "efa"})
    return there


def image(folder: Path, *has: str) -> None:
    """A node's commands: those that it has answer, the others find nothing."""
    folder.mkdir()
    for name, answer in PROGRAMS.items():
        body = f"echo '{answer}'" if name in has else "exit 1"
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    """Runs the check itself on nodes whose commands are made up."""

    def run_on_all(_, names, command):
        argv = {name: ["env", f"PATH={tmp_path / name}:{os.environ['PATH']}", "sh", "-c", command] for name in names}
        return {name: subprocess.run(words, capture_output=True, text=True) for name, words in argv.items()}

    monkeypatch.setattr(efa.ssh, "run_on_all", run_on_all)
    return tmp_path


def test_image_with_libfabric_and_the_plugin_is_accepted(nodes):
    image(nodes / "n0", *PROGRAMS)
    image(nodes / "n1", *PROGRAMS)
    efa.require(on_efa(8, 8), ["fast"], ["n0", "n1"], cuda=True)
    efa.require(on_efa(0, 0), ["fast"], ["n0", "n1"], cuda=False)


def test_image_without_them_is_refused_and_every_node_is_named(nodes):
    image(nodes / "n0", *PROGRAMS)
    image(nodes / "n1", "fi_info")
    with pytest.raises(UserError) as caught:
        efa.require(on_efa(8, 8), ["fast"], ["n0", "n1"], cuda=True)
    assert str(caught.value) == (
        "cluster.fabrics.fast.transport: efa: n1 lacks the NCCL plugin aws-ofi-nccl (libnccl-net.so in ldconfig -p); "
        "use an AMI that has it (cluster.aws.ami), or transport tcp"
    )
    with pytest.raises(UserError, match="n1 lacks OpenMPI with libfabric"):
        efa.require(on_efa(0, 0), ["fast"], ["n0", "n1"], cuda=False)


def test_other_transports_ask_no_node():
    there = cluster(8, 8)
    efa.require(there, there.fabrics, ["n0", "n1"], cuda=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engines": ["horovod-gloo"]}, "plan.engines: horovod-gloo sends over sockets, which fast with transport efa"),
        ({"engines": ["ddp"], "device": "cpu"}, "plan.engines: ddp sends over sockets"),
        ({"container": "x@sha256:1"}, "plan.container: fast has transport efa"),
    ],
)
def test_what_cannot_send_over_efa_is_refused(changes, message):
    plan = Plan(**{"nodes": [2], "batches": [32], "fabrics": ["fast"], "device": "cuda", **changes})
    with pytest.raises(UserError, match=message):
        check.check(plan, on_efa(1, 1), 2)


def test_horovod_and_ddp_on_gpus_run_over_efa():
    plan = Plan(nodes=[2], batches=[32], fabrics=["fast"], device="cuda", engines=["horovod", "ddp"])
    check.check(plan, on_efa(1, 1), 2)
