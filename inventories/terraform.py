#!/usr/bin/env python3
"""Ansible's dynamic inventory, made from Terraform's output `cluster` and the completed cluster.yml of the last deploy.

The environment is the folder it is called from (inventories/<env>/terraform.py is a link to this file) or ENV.
CLUSTER_FILE names another completed cluster.yml.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
if Path(sys.prefix) != VENV and (VENV / "bin/python").exists():
    os.execv(VENV / "bin/python", [str(VENV / "bin/python"), *sys.argv])  # noqa: S606

from cluster import image, tuning  # noqa: E402
from cluster.core import config, ssh  # noqa: E402
from cluster.core.config import Cluster  # noqa: E402
from cluster.core.contract import Contract  # noqa: E402
from cluster.core.errors import InfraError, UserError  # noqa: E402
from cluster.core.state import State  # noqa: E402
from cluster.terraform import read_output  # noqa: E402


def ssh_vars(contract: Contract) -> dict[str, Any]:
    return {
        "ansible_user": contract.login.user,
        "ansible_port": contract.login.port,
        "ansible_ssh_private_key_file": contract.login.key,
        "ansible_ssh_common_args": " ".join(ssh.options(contract)),
        "ansible_python_interpreter": "/usr/bin/python3",
    }


def inventory(contract: Contract, state: State, cluster: Cluster) -> dict[str, Any]:
    names = [name for name, _ in contract.ordered()]
    hostvars = {
        name: {
            "ansible_host": contract.address(name),
            "node_index": node.index,
            "node_fabric_addresses": node.fabric_addresses,
            "node_interfaces": {fabric: contract.interface(name, fabric) for fabric in contract.fabrics},
            "node_gpus": node.gpus,
            "node_gpu_model": node.gpu_model,
        }
        for name, node in contract.ordered()
    }
    return {
        "_meta": {"hostvars": hostvars},
        "all": {"children": ["cluster"]},
        "cluster": {
            "hosts": names,
            "vars": {
                **ssh_vars(contract),
                **image.node_variables(state, cluster),
                **tuning.role_variables(
                    state.env, contract.active_fabric, contract.fabrics[contract.active_fabric], contract.provider
                ),
                "contract_fabrics": {key: value.model_dump() for key, value in contract.fabrics.items()},
                "contract_active_fabric": contract.active_fabric,
                "contract_storage": contract.storage.model_dump(),
                "contract_provider": contract.provider,
                "contract_adopted": contract.provider == "baremetal",
                # Its `cluster` must win over the one in group_vars: site.yml reads it as a vars file.
                "cluster_file": os.environ.get("CLUSTER_FILE") or str(state.cluster_file),
            },
        },
        "adopted": {"hosts": names if contract.provider == "baremetal" else []},
        "head": {"hosts": [contract.head]},
        "workers": {"hosts": [name for name in names if name != contract.head]},
        "gpu": {"hosts": [name for name, node in contract.ordered() if node.gpus]},
    }


def main() -> int:
    called = Path(sys.argv[0]).absolute().parent
    env = os.environ.get("ENV", "local") if called.name == "inventories" else called.name
    try:
        state = State(env)
        file = os.environ.get("CLUSTER_FILE")
        cluster = config.read(Path(file)) if file else state.cluster()
        print(json.dumps(inventory(read_output(state), state, cluster), indent=1))
    except (UserError, InfraError) as error:
        print(f"inventory: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
