"""Elastic runs: how many nodes they may have, and the launchers that go on when a node is lost or comes back."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

from bench.sweep.launch import HOROVODRUN, MASTER_PORT, TORCHRUN, Launch
from cluster.core import worker_files
from cluster.core.errors import UserError

# A rank that hangs is noticed after this long. It also covers the start of a rank (torch's import, the GPU): ranks that
# go on wait for a new one, and would fail.
GLOO_SECONDS = 30
# A node whose rank failed is used again after this long, longer each time. Without it, never.
COOLDOWN_SECONDS = (5, 30)
# torchrun counts failed ranks, not nodes that come and go.
RESTARTS = 100


@dataclass(frozen=True)
class Range:
    """Numbers of nodes: fewer than min wait for more, start is needed to begin."""

    min: int
    max: int

    @property
    def start(self) -> int:
        # Horovod finds no network interface on one node.
        return max(self.min, 2)

    def record(self) -> dict[str, int]:
        return {**asdict(self), "start": self.start}


def chosen(args: argparse.Namespace, count: int) -> Range | None:
    """--min-nodes and --max-nodes, checked against a cluster of so many nodes."""
    if args.min_nodes is None:
        if args.max_nodes is not None:
            raise UserError("--max-nodes: only with --min-nodes, which makes a run elastic")
        return None
    found = Range(args.min_nodes, args.max_nodes or count)
    if found.max > count:
        raise UserError(f"--max-nodes {found.max}: the cluster has {count}")
    if found.max < found.start:
        raise UserError(f"--max-nodes {found.max}: give {found.start} or more; a run on one node cannot be elastic")
    given = {"--nodes": args.nodes, "--grid": args.grid, "--then stop": args.then == "stop"}
    if wrong := next((name for name, value in given.items() if value), None):
        raise UserError(f"{wrong}: not with --min-nodes")
    return found


def horovodrun(launch: Launch, nodes: Range, hosts_file: str | None) -> list[str]:
    """Horovod Elastic over Gloo. The file names the nodes that can be used now (bench/worker/run_hosts.py)."""
    hosts = ["--host-discovery-script", f"cat {hosts_file}"] if hosts_file else ["-H", launch.host_list]
    values = [f"{name}={value}" for name, value in launch.environment.items()]
    counts = [str(number * launch.slots) for number in (nodes.start, nodes.min, nodes.max)]
    return [
        *("env", *values, HOROVODRUN, "--gloo", "-np", counts[0], "--min-np", counts[1], "--max-np", counts[2]),
        *(*hosts, "--network-interfaces", launch.interface),
        *("--gloo-timeout-seconds", str(GLOO_SECONDS)),
        *("--blacklist-cooldown-range", *map(str, COOLDOWN_SECONDS)),
        *launch.command,
    ]


def torchrun(launch: Launch, nodes: Range, hosts_file: str | None) -> list[str]:
    """A torchrun per node, started by run_torchrun.py. They meet at the first one, whose loss ends the run."""
    everywhere = ["python3", worker_files.folder(), "run_torchrun", hosts_file] if hosts_file else []
    # A node that comes back starts its own store otherwise, and waits there alone.
    values = {**launch.environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    start = ["env", *(f"{name}={value}" for name, value in values.items()), *launch.container_command, TORCHRUN]
    return [
        *everywhere,
        *start,
        *("--nnodes", f"{nodes.min}:{nodes.max}", "--nproc-per-node", str(launch.slots), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"{launch.hosts[0]}:{MASTER_PORT}", "--rdzv-id", launch.run),
        *("--rdzv-conf", "last_call_timeout=5", "--max-restarts", str(RESTARTS), "--no-python", *launch.words),
    ]


def hosts_file(run: str) -> str:
    return f"/run/run-{run}-launch/hosts"
