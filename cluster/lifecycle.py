"""Deploy, scale, destroy and the status of a cluster: the order of the steps, and their output."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from cluster import (
    background,
    device_check,
    health,
    horovod_wheel,
    image,
    in_use,
    lab,
    nccl_tests,
    recovery,
    survey,
    wheelhouse,
)
from cluster.core import causes, config, files, lock, root, ssh, tfstate
from cluster.core.config import ROOT, Cluster, layout
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.process import PlaybookTasks, end_leftovers, run_logged
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.core.terminal import Console
from cluster.providers import registry
from cluster.providers.base import NodeState
from cluster.providers.gpulab.training_image import build
from cluster.recovery import Found
from cluster.terraform import Root, read_output

console = Console(highlight=False, markup=False, soft_wrap=True)
MISSING = NodeState("missing")


def playbook(
    state: State,
    name: str,
    progress: Progress,
    *options: str,
    cluster_file: Path | None = None,
    changes: Path | None = None,
) -> str:
    # As an extra variable, because group_vars, where cluster.yml is, would win over the inventory.
    file = cluster_file or state.cluster_file
    given: list[str | Path] = ["-i", ROOT / "inventories" / state.env, "-e", f"@{file}", *options]
    env = state.environment() | {"CLUSTER_FILE": str(file)}
    env |= {"CLUSTER_CHANGES": str(changes)} if changes else {}
    argv = ["ansible-playbook", *given, ROOT / "ansible" / name]
    with progress.part("ansible", "reading the inventory"):
        watch = PlaybookTasks(lambda text: progress.now("ansible", text))
        explain = partial(causes.ansible, journal=partial(read_journal, state))
        return run_logged(argv, state.log("ansible"), env, f"ansible/{name}", cwd=ROOT, watch=watch, explain=explain)


def read_journal(state: State, node: str, unit: str) -> str:
    """The last lines of a service on a node; "" if the node cannot be asked."""
    with suppress(InfraError, UserError):
        contract = read_output(state)
        if node in contract.nodes:
            command = f"sudo -n journalctl --no-pager -o cat -n 30 -u {shlex.quote(unit)}"
            return ssh.run_on_all(contract, [node], command)[node].stdout
    return ""


def count_changes(output: str) -> int:
    """Sum of changed= in Ansible's recap."""
    words = [word for line in output.splitlines() if " ok=" in line for word in line.split()]
    return sum(int(word.removeprefix("changed=")) for word in words if word.startswith("changed="))


def deploy(env: str, nodes: int | None, as_json: bool, yes: bool = False, replace: bool = False) -> None:
    """yes: remove nodes that are in use. replace: give up nodes that cannot be kept, and their data."""
    cluster = config.load(env, nodes)
    state = State(env)
    progress = Progress(env, stderr=as_json)
    wheelhouse.check(stack_wheelhouses(state, cluster), cluster.os_release)
    horovod_wheel.given(cluster)
    found = recovery.examine(state, cluster, nodes, replace)
    cluster, provider = found.cluster, found.provider
    deployed = deployed_contract(state) if provider.has_nodes and nodes is not None else None
    if deployed and (removed := [name for name, node in deployed.nodes.items() if node.index >= cluster.nodes]):
        in_use.confirm(state, deployed, removed, f"remove {', '.join(removed)}", yes, share=False)
    provider.check()
    waiting = lock.disturbing(cluster.provider, progress.waiting)
    with state.locked(), progress.phase("deploy", quiet=True), waiting:
        if ended := end_leftovers(state.dir):
            progress(f"stopped {ended} processes of an interrupted run")
        found.carry_out(progress)
        state.prepare(found.new_key)
        provider.prepare(progress)
        with progress.phase("image"):
            node_image = provider.ensure_image(progress)
            expected = stack_wheelhouses(state, cluster)
            if not node_image:
                progress("filling the wheelhouse; Ansible installs everything on the nodes")
                fetch_packages(state, cluster, progress)
        with progress.phase(f"terraform: {cluster.nodes} nodes"):
            contract = apply(found, progress)
            provider.wait_for_nodes(contract, progress)
            if provider.learn(contract):
                contract = apply(found, progress)
        if not provider.has_nodes:
            progress(f"{len(contract.nodes)} jobs can be started; next: make bench ENV={env}")
            return
        for line in survey.run(state, cluster, contract):
            progress(line)
        if not node_image and stack_wheelhouses(state, cluster) != expected:
            # cluster.yml did not name the GPUs that the nodes have.
            fetch_packages(state, cluster, progress)
        lab.prepare(state, cluster, contract)
        # Without an image, the head or the first worker compiles.
        logins = [] if node_image else [ssh.argv(contract, name) for name, _ in contract.ordered()[:2]]
        with progress.phase("ansible: configure"), background.shown(logins, progress):
            try:
                output = playbook(state, "site.yml", progress, changes=provider.changes)
            finally:
                provider.configured(progress)
            progress(f"ansible changed {count_changes(output)} things")
        with progress.phase("validate"):
            with progress.polled("links", lambda: health.validation_now(contract), health.SHOW_SECONDS):
                playbook(state, "validate.yml", progress)
            with progress.part("horovod", "training one step on all nodes"):
                proof = health.prove(state, contract)
            result = {**files.mapping(state.validation), "horovod": proof}
            if contract.gpus_per_node:
                with progress.part("gpus", "a product of matrices on every GPU, and NCCL over all"):
                    result["gpus"] = device_check.validate(env, contract).result()
            state.validation.write_text(json.dumps(result))
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        show_validation(result)
        next_steps(env, contract, cluster.features.jupyterlab)


def fetch_packages(state: State, cluster: Cluster, progress: Progress) -> None:
    wheelhouses = stack_wheelhouses(state, cluster)
    wheelhouse.fill(wheelhouses, cluster.os_release, state.log("image"), progress)
    if "nccl" in wheelhouses:
        nccl_tests.fetch(progress)


def stack_wheelhouses(state: State, cluster: Cluster) -> list[str]:
    return image.wheelhouses_of(cluster, survey.decision(state, cluster).stack)


def deployed_contract(state: State) -> Contract | None:
    """None before the first deploy, after one that was interrupted, and without Terraform's state."""
    with suppress(InfraError, UserError):
        return read_output(state)
    return None


def apply(found: Found, progress: Progress) -> Contract:
    """Terraform apply. The provider first reports nodes that have died, which Terraform does not notice."""
    state, provider = found.state, found.provider
    root = Root(state, found.cluster, provider)
    known = None
    if state.tfstate.exists():
        # No output means that an apply was interrupted; this one completes it.
        with suppress(InfraError):
            known = root.output()
    elif not found.adopted:
        provider.remove_leftovers()
    provider.before_apply(progress)
    before = tfstate.identities(state.tfstate)
    replace = sorted({*(provider.repair(known, progress) if known else []), *found.addresses()})
    try:
        root.apply(replace, progress)
    except InfraError as error:
        # Something else may have taken our name or a subnet since the check, while an image was built; say who has it.
        provider.check()
        created = dict(tfstate.identities(state.tfstate) - before)
        raise provider.after_failure(error, created, None if before else partial(root.destroy, progress)) from None
    root.cluster_file.replace(state.cluster_file)
    return root.output()


def show_validation(result: dict[str, Any]) -> None:
    title = f"validation: fabric {result['fabric']}, {result['rate_gbps']} Gbit/s"
    columns = ("node", "reachable from head", "to", "payload Gbit/s", "rate on the wire")
    table = Table(*columns, title=title, title_justify="left")
    for row in result["ring"]:
        share = f"{row['wire_gbps'] / result['rate_gbps']:.0%}"
        table.add_row(row["node"], "yes", row["to"], f"{row['gbps']:.3f}", share)
    console.print(table)
    console.print(f"MPI over the fabric: {result['mpi']}; Horovod: {result['horovod']}")
    if result["share"]:
        path, nodes = result["share"]["path"], ", ".join(result["share"]["read_on"])
        console.print(f"share {path}: written by the head, read on {nodes}")
    if gpus := result.get("gpus"):
        table = Table("node", "GPU", "name", "driver", "CUDA", "NCCL", "product", "links of its GPUs")
        for row in device_check.rows(gpus):
            table.add_row(*row)
        console.print(table)
        floor = f", at least {gpus['floor_gbps']:g} expected" if gpus["floor_gbps"] else ""
        console.print(f"NCCL over all GPUs: {gpus['bus_gbps']:g} Gbit/s of bus bandwidth{floor}")
    for warning in result["warnings"]:
        console.print(f"warning: {warning}")


def next_steps(env: str, contract: Contract, has_lab: bool) -> None:
    suffix = "" if env == "local" else f" ENV={env}"
    line = f"  make lab{suffix}                where its JupyterLab is, and the token\n" if has_lab else ""
    console.print(
        f"\n{len(contract.nodes)} nodes are up and validated. Next:\n"
        f"  make bench{suffix}              measure how training scales on them\n"
        f"  make shell NODE=head{suffix}    log in\n"
        f"{line}"
        f"  make status{suffix}             look at them\n"
        f"  make destroy{suffix}            remove everything"
    )


def status(env: str, as_json: bool) -> int:
    state = State(env)
    cluster = state.cluster()
    contract = read_output(state)
    provider = registry.provider(state, cluster)
    real = provider.node_states(contract)
    seen = health.look(state, contract) if provider.has_nodes else {}
    rows = []
    for name, node in contract.ordered():
        info = real.get(name, MISSING)
        current, since = info.state, info.since if info.state == "running" else None
        uptime = None if since is None else int(time.time()) - since
        known: dict[str, Any] = {"node": name, "role": node.role, "state": current, "address": node.management_address}
        found = seen.get(name, health.Health())
        rows.append(known | {"uptime_s": uptime, "roles_ok": not found.problem, "problem": str(found)})
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        table = Table("node", "role", "state", "address", "uptime", "roles ok")
        for row in rows:
            shown = "-" if row["uptime_s"] is None else f"{row['uptime_s']} s"
            cells = (row["node"], row["role"], row["state"], row["address"], shown, "yes" if row["roles_ok"] else "NO")
            table.add_row(*map(str, cells))
        console.print(table)
        for row in rows:
            if row["problem"]:
                console.print(f"node {row['node']}: {row['problem']}")
        if user := lock.holder(state.lock):
            console.print(f"in use by {user}")
        for line in provider.status_notes():
            console.print(line)
    healthy = all(row["state"] in ("running", "ready") and not row["problem"] for row in rows)
    if not healthy and not as_json:
        console.print(f"repair: make deploy ENV={env}")
    return 0 if healthy else 1


def shell(env: str, node: str, admin: bool = False) -> None:
    """Become a login shell on the node: of the training account, in the share; with admin, of the login account.

    The training account has the key to the other nodes and no sudo. The way to it is the login account's own sudo.
    """
    provider = State(env).cluster().provider
    if not registry.PROVIDERS[provider].has_nodes:
        raise UserError(f"ENV={env}: provider {provider} has jobs and no nodes to log in to")
    contract = read_output(State(env))
    if node not in contract.nodes:
        names = ", ".join(name for name, _ in contract.ordered())
        raise UserError(f"NODE={node}: no such node; choose one of {names}")
    argv = ssh.argv(contract, node, *([] if admin else [training_shell(contract)]), batch=False)
    os.execvp(argv[0], [argv[0], "-t", *argv[1:]])  # noqa: S606


def training_shell(contract: Contract) -> str:
    folder = shlex.quote(contract.storage.path) if contract.storage.backend != "none" else "~"
    start = f"cd {folder} 2> /dev/null || cd; exec bash -l"
    return f"sudo -u {layout()['user']} -H env -u SUDO_COMMAND sh -c {shlex.quote(start)}"


def destroy(env: str, yes: bool = False) -> None:
    state, progress = State(env), Progress(env)
    cluster = state.cluster()
    provider = registry.provider(state, cluster)
    if provider.needs_root:
        root.require("podman")
    contract = deployed_contract(state) if provider.has_nodes else None
    names = list(contract.nodes) if contract else []
    in_use.confirm(state, contract, names, f"destroy ENV={env}", yes, share=True)
    with state.locked(ends_runs=True):
        end_leftovers(state.dir)
        if state.dir.exists():
            state.prepare(new_key=True)
        # Without Terraform's state, what we own is removed below.
        if state.tfstate.exists() and not tfstate.damage(state.tfstate):
            with progress.phase("terraform destroy"):
                Root(state, cluster, provider).destroy(progress)
        what = f"what is left of {cluster.name}"
        with progress.phase("remove leftovers"), progress.part("leftovers", what):
            state.prepare(new_key=True)
            provider.remove_leftovers()
            end_leftovers(state.dir)
            state.remove()
    progress(f"ENV={env}: {provider.removed}")


def renew(env: str) -> None:
    state, progress = State(env), Progress(env)
    provider = registry.provider(state, state.cluster())
    with nullcontext() if provider.renews_during_runs else state.locked():
        progress(provider.renew())


def training_image(env: str, device: str) -> None:
    state, cluster, progress = State(env), config.load(env), Progress(env)
    root.require("podman")
    with state.locked():
        state.prepare()
        with progress.phase("training image"):
            name = build(state, cluster, progress, device)
    progress(f"built {name}\n  push it where GPULab can pull it: podman push {name} REGISTRY/horovod-training:1")
    progress("then name it in cluster.gpulab.image")


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
