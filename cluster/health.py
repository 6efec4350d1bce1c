"""What a deployed node reports over a fresh SSH connection, and whether Horovod trains on all nodes together."""

from __future__ import annotations

from dataclasses import dataclass
from subprocess import CompletedProcess

from typing_extensions import TypedDict

from cluster import tuning
from cluster.core import files, lock, ssh
from cluster.core.config import layout
from cluster.core.contract import Contract
from cluster.core.errors import InfraError
from cluster.core.printable import printable
from cluster.core.state import State

VENV = layout()["venv"]
UNITS = ("cluster-firewall", "fabric-rate", "cluster-hosts", "ssh")
LOOK = (
    # Ubuntu 24.04 starts ssh.service at the first login; until then only ssh.socket is active.
    f"for unit in {' '.join(UNITS)}; do systemctl is-active -q $unit $unit.socket || "
    'echo "problem $unit is not active"; done; '
    "for pair in node:munge node:slurmd head:slurmctld; do ! test -e /etc/horovod-cluster/slurm-${pair%:*} || "
    'systemctl is-active -q ${pair#*:} || echo "problem ${pair#*:} is not active"; done; '
    f"test -x {VENV}/bin/horovodrun || echo 'problem Horovod is missing in {VENV}'; "
    "sudo -n /usr/local/sbin/fabric-rate show"
)
# A rate is set in whole kbit/s.
RATE_TOLERANCE = 0.01
# What a rank of training does first: import torch and Horovod, start it, and add up over all ranks. It ends at once:
# Gloo's threads can abort an ordinary exit. The launcher names the head's card, horovod.env the node's own.
RANK = (
    "import os; lines = open('/etc/horovod-cluster/horovod.env').read().split(); "
    "os.environ.update(line.split('=', 1) for line in lines); "
    "import torch, horovod.torch as hvd; hvd.init(); "
    "total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name='proof').item(); "
    "print('ranks', hvd.size(), 'sum', int(total), flush=True); hvd.shutdown(); os._exit(0)"
)
PROOF_TIMEOUT = 300
# CURRENT in ansible/files/validate_cluster.py
CURRENT = "/tmp/horovod-validation"  # noqa: S108 (on the head)
SHOW_SECONDS = 4.0


@dataclass(frozen=True)
class Health:
    """problem: why a node cannot train; throttled: the rate that a killed measurement left. Empty if there is none."""

    problem: str = ""
    throttled: str = ""

    def __str__(self) -> str:
        return self.problem or self.throttled


class Rate(TypedDict):
    """What fabric-rate prints; null: no limit."""

    mbit: float | None


def validation_now(contract: Contract) -> str:
    """What validate_cluster.py does on the head: one Ansible task, which takes a minute on a busy machine."""
    done = ssh.run_on_all(contract, [contract.head], f"cat {CURRENT}", timeout=10)[contract.head]
    return "" if done.returncode else printable(done.stdout.strip())[:100]


def look(state: State, contract: Contract) -> dict[str, Health]:
    """The health of every node. While a command uses the cluster, its rate may differ."""
    fabric = contract.fabrics[contract.active_fabric]
    wanted = fabric.rate_gbps * 1000 if fabric.shaped and lock.holder(state.lock) is None else None
    answers = ssh.run_on_all(contract, contract.nodes, LOOK)
    return {name: judge(done, wanted) for name, done in answers.items()}


def judge(done: CompletedProcess[str], wanted_mbit: float | None) -> Health:
    lines = done.stdout.splitlines()
    if problems := [line.removeprefix("problem ") for line in lines if line.startswith("problem ")]:
        return Health("; ".join(problems))
    if done.returncode:
        return Health(last_line(done.stderr) or f"a check ended with code {done.returncode}")
    try:
        mbit = files.answer(lines[-1] if lines else "", "fabric-rate", Rate)["mbit"]
    except InfraError as error:
        return Health(str(error))
    if wanted_mbit is None or (mbit is not None and abs(mbit / wanted_mbit - 1) <= RATE_TOLERANCE):
        return Health()
    found = "has no limit" if mbit is None else f"is limited to {mbit:g} Mbit/s"
    return Health(throttled=f"the fabric {found} instead of {wanted_mbit:g}: a measurement was killed")


def prove(state: State, contract: Contract) -> str:
    """Run what training runs, as a sweep runs it. Returns what all ranks found; raises InfraError."""
    for name, health in look(state, contract).items():
        if health.problem:
            raise InfraError(f"node {name}: {health.problem}; see `make doctor ENV={state.env}`")
    names = [name for name, _ in contract.ordered()]
    argv = ssh.as_training_account(contract, names[0], launch(state.env, contract, names))
    done = ssh.gather({names[0]: argv}, timeout=PROOF_TIMEOUT)[names[0]]
    wanted = f"ranks {len(names)} sum {len(names)}"
    if done.returncode or done.stdout.count(wanted) != len(names):
        reason = last_line(done.stderr) or last_line(done.stdout) or "no output"
        raise InfraError(f"Horovod does not train on {', '.join(names)}: {reason}")
    return f"{len(names)} ranks, sum {len(names)}"


def launch(env: str, contract: Contract, names: list[str]) -> list[str]:
    """The launcher of the active fabric, as in bench/sweep/launch.py."""
    fabric = contract.fabrics[contract.active_fabric]
    hosts = ["-np", str(len(names)), "-H", ",".join(f"{name}:1" for name in names)]
    rank = [f"{VENV}/bin/python", "-c", RANK]
    chosen = tuning.choose(tuning.load(env), contract.active_fabric, fabric, contract.provider)
    if len(names) > 1 and chosen.engine == "horovod-gloo":
        card = contract.interface(names[0])
        interface, variables = ["--network-interfaces", card], [f"HOROVOD_GLOO_IFACE={card}", "OMP_NUM_THREADS=1"]
        return ["env", *variables, "/usr/local/bin/horovodrun", "--gloo", *hosts, *interface, *rank]
    subnet = contract.subnet(contract.active_fabric)
    tcp = [word for name in ("btl_tcp_if_include", "oob_tcp_if_include") for word in ("-mca", name, subnet)]
    return ["mpirun", *hosts, "-bind-to", "none", *tcp, "-x", "OMP_NUM_THREADS=1", *rank]


def last_line(text: str) -> str:
    # MPI frames its messages with dashes.
    lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
    return printable(lines[-1])[:300] if lines else ""
