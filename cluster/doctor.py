"""`cluster doctor`: list problems of this machine and of the cluster, with the commands that fix them."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

from cluster import health, lifecycle, recovery
from cluster.core import config, root
from cluster.core.config import Cluster
from cluster.core.errors import InfraError, UserError
from cluster.core.state import State, terraform_binary, terraform_version
from cluster.core.terminal import Console
from cluster.providers import registry
from cluster.providers.base import Check, Provider
from cluster.terraform import read_output

DISK_GB = 12


def checks(env: str) -> list[Check]:
    """All checks of an environment; a bad cluster.yml raises UserError."""
    cluster = config.load(env)
    state = State(env)
    provider = registry.provider(state, cluster)
    version = terraform_version(str(terraform_binary()))
    free = shutil.disk_usage(config.ROOT).free / 1e9
    found = [
        cluster_check(cluster, provider),
        Check("ssh", bool(shutil.which("ssh")), shutil.which("ssh") or "not found", "apt-get install openssh-client"),
        *provider.checks(),
        Check("terraform", version >= (1, 7), ".".join(map(str, version)), "make setup"),
        Check("disk", free > DISK_GB, f"{free:.0f} GB free", f"free {DISK_GB} GB"),
    ]
    if state.tfstate.exists() or state.cluster_file.exists():
        repair = f"make deploy ENV={env}"
        try:
            recovery.examine(state, cluster, None, replace=False)
        except UserError as error:
            # A plain deploy would stop with this.
            repair += " REPLACE=1"
            found.append(Check("what is deployed", False, str(error), repair))
        except InfraError as error:
            found.append(Check("what is deployed", False, str(error), repair))
        try:
            contract = read_output(state)
            states = provider.node_states(contract)
            answers = health.look(state, contract) if provider.has_nodes else {}
            for name, _ in contract.ordered() if provider.has_nodes else []:
                current = states.get(name, lifecycle.MISSING).state
                ok = current == "running" and not str(answers[name])
                detail = current if current != "running" or ok else f"running, but {answers[name]}"
                found.append(Check(f"node {name}", ok, detail, repair))
        except (InfraError, UserError) as error:
            found.append(Check("deployment", False, str(error), repair))
    return found


def cluster_check(cluster: Cluster, provider: Provider) -> Check:
    """What a deploy refuses in cluster.yml, doctor reports."""
    try:
        if root.available() or not provider.needs_root:
            provider.check()
    except UserError as error:
        return Check("cluster.yml", False, str(error), f"edit {config.cluster_file(provider.state.env)}")
    except InfraError:
        # A tool is missing; the provider's own checks name it.
        pass
    return Check("cluster.yml", True, f"{cluster.nodes} nodes, provider {cluster.provider}")


def run(env: str, as_json: bool) -> int:
    try:
        found = checks(env)
    except UserError as error:
        if as_json:
            print(json.dumps({"ok": False, "failures": [{"name": "cluster.yml", "detail": str(error)}]}, indent=1))
        raise
    failures = [check for check in found if not check.ok]
    if as_json:
        lists = {"failures": list(map(asdict, failures)), "checks": list(map(asdict, found))}
        print(json.dumps({"ok": not failures, **lists}, indent=1))
    else:
        console = Console(highlight=False, markup=False)
        for check in found:
            console.print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}")
            if not check.ok and check.fix:
                console.print(f"     fix: {check.fix}")
    return 1 if failures else 0
