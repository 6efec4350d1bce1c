"""Deploy, look at, scale and destroy a cluster: the order of things, and what the user sees meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster import config, image, wheelhouse
from cluster.config import ROOT, Cluster
from cluster.contract import Contract
from cluster.errors import InfraError, UserError
from cluster.process import end_leftovers, run_logged
from cluster.state import CACHE, State
from cluster.terraform import Root, read_output

console = Console(highlight=False, soft_wrap=True)
STARTED = time.monotonic()


def say(text: str) -> None:
    console.print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", markup=False)


@contextmanager
def phase(name: str) -> Iterator[None]:
    say(name)
    start = time.monotonic()
    yield
    say(f"{name}: done in {time.monotonic() - start:.1f} s")


def node_tool(state: State, cluster: Cluster, action: str, **values: object) -> str:
    """Ask the provider's node.py, where it has one, about the nodes themselves."""
    tool = ROOT / "terraform" / cluster.provider / "node.py"
    env = state.environment() | {"INPUT": json.dumps({"cluster": cluster.name, **values})}
    done = subprocess.run([sys.executable, tool, action], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InfraError(done.stderr.strip())
    return done.stdout


def real_states(state: State, cluster: Cluster) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(node_tool(state, cluster, "states"))
    return found


def playbook(state: State, name: str, **values: object) -> str:
    argv: list[str | Path] = ["ansible-playbook", "-i", ROOT / "inventories" / state.env, ROOT / "ansible" / name]
    return run_logged(
        [*argv, "-e", json.dumps(values)], state.log("ansible"), state.environment(), f"ansible/{name}", cwd=ROOT
    )


def count_changes(output: str) -> int:
    """Sum of changed= in Ansible's recap."""
    words = [word for line in output.splitlines() if " ok=" in line for word in line.split()]
    return sum(int(word.removeprefix("changed=")) for word in words if word.startswith("changed="))


def deploy(env: str, nodes: int | None, as_json: bool) -> None:
    cluster = config.load(env, nodes)
    state = State(env)
    if nodes is None and state.tfstate.exists():
        # A count given earlier with NODES= or by scale stays until another is given.
        with suppress(InfraError):
            cluster = cluster.model_copy(update={"nodes": len(read_output(state).nodes)})
    with state.locked():
        ended = end_leftovers(state.dir)
        if ended:
            say(f"ended {ended} processes of an earlier, interrupted run")
        state.prepare()
        with phase("image"):
            name = image.ensure(state, cluster, say)
        with phase(f"terraform: {cluster.nodes} nodes"):
            contract = apply(state, cluster, name)
        with phase("ansible: configure"):
            values = {
                "image_key": image.node_key(cluster.os_release),
                "wheelhouse": str(wheelhouse.folder()),
                "horovod_wheel_cache": str(CACHE / "horovod"),
            }
            changed = count_changes(playbook(state, "site.yml", **values))
            say(f"ansible changed {changed} things")
        with phase("validate"):
            playbook(state, "validate.yml", validation_file=str(state.validation))
    result = json.loads(state.validation.read_text())
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        show_validation(result)
        next_steps(env, contract)


def apply(state: State, cluster: Cluster, image_name: str) -> Contract:
    """Terraform, after looking at what really runs: it does not notice a node that died."""
    root = Root(state, cluster)
    replace = []
    if state.tfstate.exists():
        try:
            known = root.output().nodes
        except InfraError:
            known = {}
        real = real_states(state, cluster)
        for name, node in known.items():
            if int(node.index) >= cluster.nodes:
                continue
            if name not in real:
                say(f"node {name} is gone: creating it again")
                replace.append(name)
            elif real[name]["state"] != "running":
                say(f"node {name} is {real[name]['state']}: starting it")
                addresses = {"management": node.management_address}
                node_tool(state, cluster, "start", name=name, addresses=addresses, ssh_port=cluster.ports.ssh)
    else:
        node_tool(state, cluster, "sweep")
    root.apply(image_name, replace)
    return root.output()


def show_validation(result: dict[str, Any]) -> None:
    table = Table(title=f"validation: fabric {result['fabric']}, {result['rate_gbps']} Gbit/s", title_justify="left")
    for column in ("node", "reachable from head", "to", "payload Gbit/s", "rate on the wire"):
        table.add_column(column)
    for row in result["ring"]:
        table.add_row(
            row["node"], "yes", row["to"], f"{row['gbps']:.3f}", f"{row['wire_gbps'] / result['rate_gbps']:.0%}"
        )
    console.print(table)
    console.print(f"MPI over the fabric: {result['mpi']}", markup=False)


def next_steps(env: str, contract: Contract) -> None:
    suffix = "" if env == "local" else f" ENV={env}"
    console.print(
        f"\n{len(contract.nodes)} nodes are up and validated. Next:\n"
        f"  make bench{suffix}              measure how training scales on them\n"
        f"  make shell NODE=head{suffix}    log in\n"
        f"  make status{suffix}             look at them\n"
        f"  make destroy{suffix}            remove everything",
        markup=False,
    )


def status(env: str, as_json: bool) -> int:
    cluster = config.load(env)
    state = State(env)
    contract = read_output(state)
    real = real_states(state, cluster)
    seen = ping(state)
    rows = []
    for name, node in contract.ordered():
        info = real.get(name)
        current = info["state"] if info else "missing"
        since = int(info["since"]) if info and current == "running" else None
        rows.append(
            {
                "node": name,
                "role": node.role,
                "state": current,
                "address": node.management_address,
                "uptime_s": None if since is None else int(time.time()) - since,
                "roles_ok": seen.get(name, False),
            }
        )
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        table = Table()
        for column in ("node", "role", "state", "address", "uptime", "roles ok"):
            table.add_column(column)
        for row in rows:
            uptime = "-" if row["uptime_s"] is None else f"{row['uptime_s']} s"
            cells = (row["node"], row["role"], row["state"], row["address"], uptime, "yes" if row["roles_ok"] else "NO")
            table.add_row(*map(str, cells))
        console.print(table)
    healthy = all(row["state"] == "running" and row["roles_ok"] for row in rows)
    if not healthy and not as_json:
        console.print(f"repair: make deploy ENV={env}", markup=False)
    return 0 if healthy else 1


# What must be true on a node after the roles ran: their units are active and nothing failed.
ROLES_OK = "systemctl is-active -q nftables fabric-rate cluster-hosts ssh && test -x /opt/horovod/bin/horovodrun"


def ssh_argv(contract: Contract, node: str, *command: str) -> list[str]:
    target = contract.nodes[node]
    argv = ["ssh", "-i", contract.ssh.key, "-o", "IdentitiesOnly=yes", "-o", "ConnectTimeout=5"]
    argv += ["-o", f"UserKnownHostsFile={contract.ssh.known_hosts}", "-o", "StrictHostKeyChecking=yes"]
    if contract.ssh.jump_host:
        argv += ["-J", contract.ssh.jump_host]
    return [*argv, f"{contract.ssh.user}@{target.management_address}", *command]


def ping(state: State) -> dict[str, bool]:
    """Which nodes answer over SSH with their roles in order; all asked at once."""
    contract = read_output(state)
    running = {
        name: subprocess.Popen(
            [*ssh_argv(contract, name)[:1], "-o", "BatchMode=yes", *ssh_argv(contract, name, ROLES_OK)[1:]],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in contract.nodes
    }
    return {name: process.wait(timeout=30) == 0 for name, process in running.items()}


def shell(env: str, node: str) -> None:
    contract = read_output(State(env))
    if node not in contract.nodes:
        names = ", ".join(name for name, _ in contract.ordered())
        raise UserError(f"NODE={node}: no such node; choose one of {names}")
    argv = ssh_argv(contract, node)
    os.execvp(argv[0], argv)  # noqa: S606


def destroy(env: str) -> None:
    cluster = config.load(env)
    state = State(env)
    with state.locked():
        end_leftovers(state.dir)
        if state.dir.exists():
            state.prepare()
        if state.tfstate.exists():
            with phase("terraform destroy"):
                Root(state, cluster).destroy()
        with phase("sweep what is left"):
            state.prepare()
            for name in (cluster.name, f"{cluster.name}-build"):
                node_tool(state, cluster.model_copy(update={"name": name}), "sweep")
            end_leftovers(state.dir)
            state.remove()
    (state.dir.parent / f"{env}.lock").unlink(missing_ok=True)
    say(f"ENV={env}: nothing is left")


def clean(env: str) -> None:
    state = State(env)
    with state.locked():
        state.prepare()
        image.clean(state)
    say("cached images and packages removed")


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
