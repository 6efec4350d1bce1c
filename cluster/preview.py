"""`cluster plan` and `cluster config`: what a deploy would change, and the completed cluster.yml."""

from __future__ import annotations

import json

from cluster import lab, recovery, survey
from cluster.core import config
from cluster.core.errors import InfraError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.lifecycle import playbook
from cluster.terraform import Root, read_output


def show_config(env: str, nodes: int | None, as_json: bool) -> int:
    cluster = config.load(env, nodes)
    print(json.dumps({"cluster": cluster.model_dump(mode="json")}, indent=1) if as_json else cluster.text(), end="")
    return 0


def run(env: str, nodes: int | None) -> int:
    cluster = config.load(env, nodes)
    state, progress = State(env), Progress(env)
    found = recovery.examine(state, cluster, nodes, replace=False)
    cluster, provider = found.cluster, found.provider
    provider.check()
    if found.damaged or found.adopted:
        nodes_found = ", ".join(found.adopted) or "no node"
        print(f"terraform: {found.damaged or 'its state has lost nodes'}; a deploy finds and adopts {nodes_found}")
        return 0
    with state.locked():
        state.prepare()
        with progress.phase("plan", quiet=True):
            provider.prepare(progress)
            provider.planned_image(progress)
        root = Root(state, cluster, provider)
        if cluster.provider == "baremetal":
            # It creates nothing, and the inventory needs its output.
            root.apply([], progress)
        else:
            with progress.phase("plan", quiet=True), progress.part("terraform", f"comparing {cluster.nodes} nodes"):
                changed, text = root.plan()
            print(text if changed else "terraform: nothing to change")
        try:
            contract = read_output(state)
        except InfraError:
            progress("ansible: no nodes yet")
            return 0
        for line in survey.run(state, cluster, contract):
            progress(line)
        lab.prepare(state, cluster, contract)
        progress(f"ansible: what would change on {len(contract.nodes)} nodes")
        with progress.phase("plan", quiet=True):
            output = playbook(state, "site.yml", progress, "--check", "--diff", cluster_file=root.cluster_file)
        # Ansible itself would hide skipped tasks only by printing the name of a task after its end.
        print("\n".join(line for line in output.splitlines() if not line.startswith("skipping:")))
    return 0
