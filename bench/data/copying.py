"""Copy a folder of shards to the head of a cluster, where nginx serves it to the fabric."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import yaml

from bench.worker import shards
from cluster.core import ssh
from cluster.core.config import ROOT
from cluster.core.errors import InfraError, UserError
from cluster.core.state import State
from cluster.terraform import read_output

DEFAULTS = ROOT / "roles/data/defaults/main.yml"


def push(folder: Path, env: str, name: str) -> str:
    """Returns the address a plan reads the shards from."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"--name: {name!r} must be letters, digits, dots and dashes")
    shards.load_index(str(folder))
    state = State(env)
    if not state.tfstate.exists():
        raise UserError(f"--env: nothing is deployed in {env}; run `make deploy ENV={env}`")
    contract = read_output(state)
    served = yaml.safe_load(DEFAULTS.read_text())
    head = next(iter(dict(contract.ordered())))
    target = f"{served['data_dir']}/{name}"
    command = (
        f"test -d {served['data_dir']} || {{ echo the feature data is off on this cluster >&2; exit 1; }}; "
        f"sudo mkdir -p {shlex.quote(target)} && sudo tar -x --no-same-owner -C {shlex.quote(target)}"
    )
    # Shards first: an index never names what is not there yet.
    names = sorted((path.name for path in folder.iterdir() if path.suffix in (".tar", ".idx")), reverse=True)
    with subprocess.Popen(
        ["tar", "-c", "-C", str(folder), "--owner=0", "--group=0", "--mode=a=rX", *names, shards.INDEX],
        stdout=subprocess.PIPE,
    ) as packing:
        done = subprocess.run(
            ssh.argv(contract, head, command), stdin=packing.stdout, capture_output=True, text=True, check=False
        )
    if done.returncode or packing.returncode:
        raise InfraError(f"{head}: cannot copy to {target}: {done.stderr.strip() or 'tar failed'}")
    return f"http://{head}:{served['data_port']}/{name}"
