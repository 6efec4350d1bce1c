"""Copy a folder of shards to the head of a cluster, where nginx serves it to the fabric."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from typing_extensions import TypedDict

from bench.worker import shards
from cluster.core import files, ssh
from cluster.core.config import ROOT
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.terraform import read_output

BLOCK = 1 << 20


class Message(TypedDict):
    msg: dict[str, str | int]


def role_variables(state: State, node: str) -> dict[str, str]:
    """The variables of the role data as a node gets them: its defaults, unless the environment sets others."""
    defaults = files.mapping(ROOT / "roles/data/defaults/main.yml")
    wanted = {name: f"{{{{ {name} | default({value!r}) }}}}" for name, value in defaults.items()}
    inventories: list[str | Path] = ["-i", ROOT / "inventories" / state.env, "-i", ROOT / "inventories/terraform.py"]
    argv = ["ansible", node, *inventories, "-m", "ansible.builtin.debug", "-a", json.dumps({"msg": wanted})]
    done = subprocess.run(argv, env=state.environment() | {"ANSIBLE_NOCOLOR": "1"}, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stdout.split()) or done.stderr
        raise InfraError(f"ansible: cannot read the variables of {node}: {reason}")
    found = files.answer(done.stdout.partition("=>")[2], f"ansible: variables of {node}", Message)["msg"]
    return {name: str(value) for name, value in found.items()}


def push(folder: Path, env: str, name: str, progress: Progress) -> str:
    """Returns the address from which a plan reads the shards."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"--name: {name!r} must be letters, digits, dots and dashes")
    shards.load_index(str(folder))
    state = State.existing(env)
    if not state.tfstate.exists():
        raise UserError(f"--env: nothing is deployed in {env}; run `make deploy ENV={env}`")
    contract = read_output(state)
    served = role_variables(state, contract.head)
    target = f"{served['data_dir']}/{name}"
    command = (
        f"test -d {served['data_dir']} || {{ echo the feature data is off on this cluster >&2; exit 1; }}; "
        f"sudo mkdir -p {shlex.quote(target)} && sudo tar -x --no-same-owner -C {shlex.quote(target)}"
    )
    # Shards first, so that the index never names a missing file.
    names = sorted((path.name for path in folder.iterdir() if path.suffix in (".tar", ".idx")), reverse=True)
    tar = ["tar", "-c", "-C", str(folder), "--owner=0", "--group=0", "--mode=a=rX", *names, shards.INDEX]
    total = sum((folder / name).stat().st_size for name in names)
    argv = ssh.argv(contract, contract.head, command)
    with Popen(tar, stdout=PIPE) as packing, Popen(argv, stdin=PIPE, stdout=DEVNULL, stderr=PIPE) as receiving:
        sent = 0
        # If the head refuses, its reason is on standard error.
        with suppress(BrokenPipeError):
            while packing.stdout and receiving.stdin and (block := packing.stdout.read(BLOCK)):
                receiving.stdin.write(block)
                sent += len(block)
                progress.now("copy", f"{sent / 1e6:,.0f} of {total / 1e6:,.0f} MB copied to {contract.head}")
        if packing.stdout:
            packing.stdout.close()
        err = receiving.communicate()[1].decode(errors="replace").strip()
    if receiving.returncode or packing.returncode:
        raise InfraError(f"{contract.head}: cannot copy to {target}: {err or 'tar failed'}")
    return f"http://{contract.head}:{served['data_port']}/{name}"
