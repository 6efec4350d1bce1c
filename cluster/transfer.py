"""`cluster put` and `cluster get`: copy files between this machine and the share, as the training account."""

from __future__ import annotations

import posixpath
import shlex
import subprocess
import sys
from pathlib import Path

from cluster.core import files, ssh
from cluster.core.config import ROOT, layout
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.state import State
from cluster.terraform import read_output


def folders() -> list[str]:
    """The folders of the share that the training account owns."""
    found: list[str] = files.mapping(ROOT / "roles/shared_storage/defaults/main.yml")["shared_storage_folders"]
    return found


def deployed(env: str) -> Contract:
    state = State(env)
    if not state.tfstate.exists():
        raise UserError(f"ENV={env}: nothing is deployed; run `make deploy ENV={env}`")
    contract = read_output(state)
    if contract.storage.backend == "none":
        raise UserError(f"ENV={env}: no share; set storage.backend in cluster.yml and run `make deploy ENV={env}`")
    return contract


def on_share(contract: Contract, field: str, text: str) -> str:
    """The absolute path on the nodes; text is relative to the share, or starts with its path."""
    share = contract.storage.path
    path = posixpath.normpath(posixpath.join(share, text))
    if path.startswith(f"{share}/") and path[len(share) + 1 :].split("/")[0] in folders():
        return path + ("/" if text.endswith("/") else "")
    raise UserError(f"{field}={text}: not in a folder of the share; write a path in {', '.join(folders())}")


def rsync(contract: Contract, source: str, target: str) -> list[str]:
    *connection, _ = ssh.argv(contract, contract.head)
    words = ["rsync", "--recursive", "--links", "--times", "--executability", "--partial", "--protect-args", "--mkpath"]
    words += ["--info=progress2"] if sys.stderr.isatty() else []
    words += [f"--rsync-path=sudo -u {layout()['user']} rsync", f"--rsh={shlex.join(connection)}"]
    return [*words, "--", source, target]


def copy(contract: Contract, source: str, target: str) -> None:
    done = subprocess.run(rsync(contract, source, target), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise InfraError(f"rsync: {reasons[0]}")


def address(contract: Contract, path: str) -> str:
    return f"{contract.login.user}@{ssh.bracketed(contract.address(contract.head))}:{path}"


def put(env: str, source: str, target: str) -> None:
    if not source:
        raise UserError("SRC: missing; give a file or folder of this machine, as in `make put SRC=images DST=datasets`")
    if not Path(source).expanduser().exists():
        raise UserError(f"SRC={source}: no such file or folder")
    contract = deployed(env)
    path = on_share(contract, "DST", target)
    # expanduser drops a trailing slash, which means "the content of this folder".
    given = str(Path(source).expanduser()) + ("/" if source.endswith("/") else "")
    # Without ./ rsync reads a name with a colon as a host.
    copy(contract, given if given.startswith("/") else f"./{given}", address(contract, path))
    print(f"copied to {path}")


def get(env: str, source: str, target: str) -> None:
    if not source:
        raise UserError("SRC: missing; give a path on the share, as in `make get SRC=runs/ID/out DST=out`")
    contract = deployed(env)
    path = on_share(contract, "SRC", source)
    look = ssh.gather({"head": ssh.as_training_account(contract, contract.head, ["test", "-e", path])})["head"]
    if look.returncode == 1:
        raise UserError(f"SRC={source}: {path} does not exist on the share")
    copy(contract, address(contract, path), target if target.startswith("/") else f"./{target}")
    print(f"copied to {target}")
