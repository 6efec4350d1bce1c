"""What the nodes are, asked before Ansible changes anything: their release, CPU, GPUs and driver.

Local nodes are not asked: they run this machine's CPU, have no GPUs, and boot our own image.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from cluster import cpus, gpus
from cluster.core import files, ssh
from cluster.core.config import RELEASES, Cluster, versions
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.prices import types
from cluster.core.state import State, write_file

# Its clang compiles the GPU code of Horovod (roles/horovod/tasks/cuda12.yml). CUDA 12 does not compile with the glibc
# of Debian 13, and the clang of Ubuntu was never tried.
COMPILES_CUDA12 = "bookworm"


@dataclass(frozen=True)
class Decision:
    """stack: CUDA stack of the GPU nodes. arch_flags: the compiler's flags for Horovod, "" for its own."""

    stack: str
    arch_flags: str


def decision(state: State, cluster: Cluster) -> Decision:
    """Of the last survey. Before the first one it follows from cluster.yml."""
    file = state.dir / "survey.json"
    if cluster.provider != "local" and file.exists():
        return Decision(**files.mapping(file))
    return Decision(gpus.expected(models(cluster)), versions()["horovod_arch_flags"])


def models(cluster: Cluster) -> set[str]:
    """GPU models that cluster.yml names."""
    found = {cluster.gpu_model}
    if cluster.baremetal:
        found |= {host.gpu_model for host in cluster.baremetal.hosts[: cluster.nodes] if host.gpus}
    if cluster.aws:
        used = {cluster.aws.instance_type, cluster.aws.head_type or cluster.aws.instance_type}
        found |= {types()[name].gpu_model for name in used}
    return found - {"none"}


def run(state: State, cluster: Cluster, contract: Contract) -> list[str]:
    """Ask all nodes and record what follows. Returns lines to show; raises an error for nodes that do not fit."""
    if cluster.provider == "local":
        return []
    made, lines = decide(cluster, contract, ask(contract))
    write_file(state.dir / "survey.json", json.dumps(asdict(made)))
    return lines


def ask(contract: Contract) -> list[gpus.Machine]:
    script = files.text(gpus.FILES / "look.sh").encode()
    answers = ssh.run_on_all(contract, contract.nodes, "sh -s", script)
    for name, done in answers.items():
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no answer"])[-1]
            raise InfraError(f"{name}: cannot be asked for its GPUs and CPU: {why}")
    return [gpus.parse(name, answers[name].stdout) for name, _ in contract.ordered()]


def decide(cluster: Cluster, contract: Contract, machines: list[gpus.Machine]) -> tuple[Decision, list[str]]:
    check_releases(cluster, machines)
    flags = versions()["horovod_arch_flags"] or cpus.arch_flags(machine.cpu for machine in machines)
    used = [one for one in machines if contract.nodes[one.name].gpus and cluster.features.gpu]
    missing = [one.name for one in used if not one.gpus]
    if missing:
        raise UserError(f"{missing[0]}: cluster.yml declares GPUs, but there is no NVIDIA GPU on its PCI bus")
    stack = gpus.stack_for(used)
    if stack == "12" and cluster.os_release != COMPILES_CUDA12 and not os.environ.get("HOROVOD_WHEEL"):
        raise UserError(
            f"{used[0].name}: its GPUs need CUDA {gpus.stacks()[stack].cuda}, for which Horovod is only compiled on "
            f"{RELEASES[COMPILES_CUDA12].title}; give HOROVOD_WHEEL=, compiled elsewhere for Python "
            f"{RELEASES[cluster.os_release].python}, or install {COMPILES_CUDA12} on the nodes"
        )
    for machine in used:
        if why := gpus.obstacle(machine, stack):
            raise UserError(f"{machine.name}: {why}")
        gpus.module_for(machine)
    lines = [gpus.summary(machine, stack) for machine in used]
    levels = {machine.name: cpus.level(machine.cpu) for machine in machines if machine.cpu}
    if len(set(levels.values())) > 1:
        oldest = min(levels, key=lambda name: levels[name])
        lines.append(f"{oldest}: its CPU is the oldest; Horovod is compiled with {flags} for all nodes")
    return Decision(stack, flags), lines


def check_releases(cluster: Cluster, machines: Iterable[gpus.Machine]) -> None:
    """One release for all nodes: packages and wheels are made for one."""
    for machine in machines:
        if machine.release != cluster.os_release or machine.system != RELEASES[cluster.os_release].system:
            raise UserError(
                f"{machine.name}: runs {machine.system} {machine.release}, but cluster.os_release is "
                f"{cluster.os_release}; all nodes must run the same release"
            )
