"""The network card of each node. Its name depends on the type and on the system, so each node is asked."""

from __future__ import annotations

from cluster.core import ssh
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError

# In the state folder, for terraform/aws: node -> fabric -> interface.
FILE = "interfaces.json"
QUESTION = "ip -o -4 address show scope global"


def card(answer: str, address: str) -> str | None:
    """The interface with this address, from lines such as `2: ens5    inet 10.78.0.5/24 brd ...`."""
    for words in map(str.split, answer.splitlines()):
        if len(words) > 3 and words[3].split("/")[0] == address:
            return words[1]
    return None


def ask(contract: Contract, wanted: str | None) -> dict[str, dict[str, str]]:
    """The interface of each fabric on each node. UserError if cluster.yml wants another one."""
    answers = ssh.run_on_all(contract, contract.nodes, QUESTION)
    found: dict[str, dict[str, str]] = {}
    for name, node in contract.ordered():
        found[name] = {}
        for fabric, address in node.fabric_addresses.items():
            seen = card(answers[name].stdout, address)
            if seen is None:
                raise InfraError(f"node {name}: no interface has the address {address} of fabric {fabric}")
            if wanted not in (None, seen):
                raise UserError(f"cluster.aws.interface: on node {name} {seen} has {address}, not {wanted}; write null")
            found[name][fabric] = seen
    return found
