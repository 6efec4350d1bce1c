"""`cluster plan`: what a deploy would change, without changing it."""

from __future__ import annotations

from cluster import lab
from cluster.core import config
from cluster.core.errors import InfraError
from cluster.core.state import State
from cluster.lifecycle import playbook, say
from cluster.providers import registry
from cluster.terraform import Root, read_output


def run(env: str, nodes: int | None) -> int:
    cluster = config.load(env, nodes)
    state = State(env)
    with state.locked():
        state.prepare()
        provider = registry.provider(state, cluster)
        provider.prepare(say)
        provider.ensure_image(say)
        root = Root(state, cluster, provider)
        if cluster.provider == "baremetal":
            # Its Terraform only writes down what is there, and the inventory needs that.
            root.apply([])
        else:
            changed, text = root.plan()
            print(text if changed else "terraform: nothing to change")
        try:
            contract = read_output(state)
        except InfraError:
            say("no node is up yet, so there is nothing to ask Ansible about")
            return 0
        lab.prepare(state, cluster, contract)
        say(f"ansible: what would change on {len(contract.nodes)} nodes")
        print(playbook(state, "site.yml", "--check", "--diff"))
    return 0
