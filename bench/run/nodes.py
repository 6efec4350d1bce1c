"""A run on the nodes: its folder on the share, its systemd units, its output and its records.

Each node has one transient unit per run, and the head a second one for the launcher. systemd ends everything in a
unit's control group with it, so a process that leaves its session, such as a data loader's, ends too.
"""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from typing_extensions import TypedDict

from bench.run import source
from bench.run.request import Request
from bench.worker import run_list
from cluster.core import files, ssh, worker_files
from cluster.core.config import layout
from cluster.core.contract import Contract
from cluster.core.errors import InfraError, UserError
from cluster.core.process import die_with_parent
from cluster.core.unpack import unpack

# Seconds in which the controller can still read the end of a run before the head shuts down.
STOP_AFTER = 20
INSTALL_SECONDS = 1800
# In run_list.py: nothing can be done with a run whose record is lost.
DAMAGED = "damaged"


class Point(TypedDict):
    name: str
    words: list[str]
    values: dict[str, Any]


class Listed(TypedDict):
    """A record as run_list.py prints it: run.json with the state and the end."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    id: str
    state: str
    command: str
    engine: str
    nodes: list[str]
    points: list[Point]
    end: dict[str, Any] | None


def share_folder(contract: Contract, run: str) -> str:
    return f"{contract.storage.path}/runs/{run}"


def worker(program: str, *words: str) -> list[str]:
    return ["python3", worker_files.folder(), program, *words]


def unit(name: str, properties: Iterable[str], words: Sequence[str]) -> list[str]:
    """Start a transient service as the training account. Its folder in /run goes with it."""
    given = [f"RuntimeDirectory={name}", "RuntimeDirectoryMode=0700", "TimeoutStopSec=5", *properties]
    options = [f"--property={value}" for value in given]
    start = ["sudo", "systemd-run", "--quiet", "--collect", f"--unit={name}", f"--uid={layout()['user']}"]
    return [*start, "--setenv=PATH=/usr/local/bin:/usr/bin:/bin", *options, *words]


def copy(contract: Contract, request: Request, record: dict[str, Any], chosen: Sequence[Path]) -> None:
    """The user's files and run.json, as one archive, to a new folder on the share."""
    folder = share_folder(contract, request.id)
    command = (
        f"mkdir -p {folder}/code {folder}/logs {folder}/out && {resumed(contract, request)} tar -xz -C {folder}/code"
    )
    argv = ssh.as_training_account(contract, contract.head, ["sh", "-c", command])
    with tempfile.TemporaryFile() as archive:
        source.write(request.folder, chosen, archive)
        archive.seek(0)
        process = subprocess.run(argv, stdin=archive, capture_output=True, text=True, check=False)
    problem = process.stderr.strip()
    if process.returncode:
        raise InfraError(f"node {contract.head}: cannot copy {request.folder} to {folder}: {problem}")
    if request.elastic:
        unpack = f"mkdir {folder}/worker && tar -x --strip-components=1 -C {folder}/worker"
        argv = ssh.as_training_account(contract, contract.head, ["sh", "-c", unpack])
        done = ssh.gather({contract.head: argv}, worker_files.archive())[contract.head]
        if done.returncode:
            raise InfraError(f"node {contract.head}: cannot copy the worker to {folder}: {done.stderr.strip()}")
    write_file(contract, f"{folder}/run.json", json.dumps(record, indent=1))


def resumed(contract: Contract, request: Request) -> str:
    """Shell commands that copy what an earlier run wrote, so that its folder stays as it is."""
    if not request.resume:
        return ""
    old, new = share_folder(contract, request.resume), share_folder(contract, request.id)
    copies = (
        f"if [ -d {old}/{name}/out ]; then mkdir -p {new}/{name} && cp -a {old}/{name}/out {new}/{name}/; fi &&"
        for name in (point["name"] for point in request.points())
    )
    return " ".join(copies)


def packages(contract: Contract, requirements: str) -> str:
    """The virtual environment with these packages, made if it is not there yet."""
    worker_files.install(contract, [contract.head])
    words = worker("run_packages", f"{contract.storage.path}/venvs", layout()["venv"])
    argv = ssh.as_training_account(contract, contract.head, words)
    done = ssh.gather({contract.head: argv}, requirements, timeout=INSTALL_SECONDS)[contract.head]
    if done.returncode == 0:
        return done.stdout.strip()
    raise not_installed(contract.head, done)


def not_installed(node: str, done: subprocess.CompletedProcess[str]) -> InfraError | UserError:
    """pip's first error, which names the package. pip calls a package unknown also where it reached no index."""
    errors = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    reason = next(iter(errors or done.stderr.splitlines()[-1:]), "no output")
    if done.returncode != 1 or not errors or "connection broken" in done.stderr:
        return InfraError(f"node {node}: cannot install packages: {reason}; does it reach a package index?")
    return UserError(f"--requirements: {reason}")


def write_file(contract: Contract, path: str, text: str) -> None:
    argv = ssh.as_training_account(contract, contract.head, ["sh", "-c", f"cat > {shlex.quote(path)}"])
    done = ssh.gather({contract.head: argv}, text)[contract.head]
    if done.returncode:
        raise InfraError(f"node {contract.head}: cannot write {path}: {done.stderr.strip()}")


def start(contract: Contract, request: Request, online: Sequence[str]) -> None:
    """Start the agents on these nodes, then the launcher on the head."""
    worker_files.install(contract, list(online))
    folder = share_folder(contract, request.id)
    # The head of an elastic run keeps the variables for nodes that come later.
    agents = dict.fromkeys([contract.head, *online]) if request.elastic else online
    watched = [folder] if request.elastic else []
    name, user = f"run-{request.id}", layout()["user"]
    # Of a run whose head was lost. run-* would also match the mounts in /run and what others start with systemd-run.
    left = "'run-[0-9]*-[0-9]*.service' 2>/dev/null"
    clean = f"sudo systemctl stop {left}; sudo systemctl reset-failed {left}"
    rdma = contract.fabrics[contract.active_fabric].transport != "tcp"
    limits = ["LimitMEMLOCK=infinity"] if rdma else []
    # Over standard input into memory: a value is in no command line, log or record.
    keep = f"sudo -u {user} sh -c 'umask 077; cat > /run/{name}/variables'"
    commands = {}
    for node in agents:
        off = ["ExecStopPost=+/bin/systemctl poweroff"] if request.then == "stop" and node != contract.head else []
        agent = shlex.join(unit(name, ["Type=notify", *limits, *off], worker("run_agent", request.id, *watched)))
        commands[node] = ssh.argv(contract, node, f"{clean}; {agent} && {keep}")
    for node, done in ssh.gather(commands, json.dumps(request.variables)).items():
        if done.returncode:
            stop(contract, request.nodes, request.id)
            raise InfraError(f"node {node}: cannot start the run: {done.stderr.strip()}; run `make doctor`")
    after = ["ExecStopPost=" + shlex.join(["/usr/bin/python3", *worker("run_end", folder)[1:]])]
    if request.then == "stop":
        after += [
            f"ExecStopPost=+/usr/bin/systemd-run --on-active={STOP_AFTER} --timer-property=AccuracySec=1s "
            "/bin/systemctl poweroff"
        ]
    # Horovod's elastic driver may wait for ever after SIGTERM. run_end.py ends its ranks.
    quickly = ["KillSignal=SIGKILL"] if request.elastic else []
    launch = unit(f"{name}-launch", ["Type=exec", "TimeoutStopSec=60", *quickly, *after], worker("run_launch", folder))
    done = ssh.run_on_all(contract, [contract.head], shlex.join(launch))[contract.head]
    if done.returncode:
        stop(contract, request.nodes, request.id)
        raise InfraError(f"node {contract.head}: cannot start the run: {done.stderr.strip()}; run `make doctor`")


def stop(contract: Contract, nodes: Iterable[str], run: str) -> None:
    """End a run: the launcher, whose end ends the rest, then what a lost head left."""
    command = f"sudo systemctl stop run-{run}-launch 2>/dev/null"
    ssh.run_on_all(contract, [contract.head], command, timeout=90)
    ssh.run_on_all(contract, nodes, f"sudo systemctl stop run-{run} 2>/dev/null", timeout=30)


def follow(contract: Contract, run: str, *, every: bool, own: bool, wait: bool = True) -> subprocess.Popen[bytes]:
    """Print a run's output on our standard output. own: it ends with us."""
    options = [*(["--all"] if every else []), *(["--own"] if own else []), *([] if wait else ["--no-wait"])]
    argv = ssh.as_training_account(contract, contract.head, worker("run_follow", share_folder(contract, run), *options))
    stdin = subprocess.PIPE if own else subprocess.DEVNULL
    return subprocess.Popen(argv, stdin=stdin, start_new_session=True, preexec_fn=die_with_parent)


def listed(contract: Contract) -> list[dict[str, Any]]:
    """The records of all runs on the share, with their states."""
    program = files.text(Path(run_list.__file__)) + "\n\nmain()\n"
    words = ["python3", "-c", program, f"{contract.storage.path}/runs"]
    argv = ssh.as_training_account(contract, contract.head, words)
    done = ssh.gather({contract.head: argv})[contract.head]
    if done.returncode:
        raise InfraError(f"node {contract.head} does not answer: {done.stderr.strip()}; run `make status`")
    return [{**one} for one in files.answer(done.stdout, f"node {contract.head}", list[Listed])]


def find(contract: Contract, run: str, field: str = "ID") -> dict[str, Any]:
    found = listed(contract)
    for one in found[-1:] if run == "latest" else found:
        if run in (one["id"], "latest"):
            if one["state"] == DAMAGED:
                folder = share_folder(contract, one["id"])
                raise UserError(f"{field} {one['id']}: {folder}/run.json is damaged; take what you need from {folder}")
            return one
    known = f"known: {', '.join(one['id'] for one in found[-3:])}" if found else "there are none"
    raise UserError(f"{field} {run[:60]}: no such run; {known}")


def fetch(contract: Contract, run: str, target: Path, parts: Sequence[str]) -> None:
    """Copy parts of a run's folder here, but no link that leaves it."""
    folder = share_folder(contract, run)
    find_parts = f"cd {folder} && ls -d {' '.join(parts)} 2>/dev/null | tar -c -T -"
    argv = ssh.as_training_account(contract, contract.head, ["sh", "-c", find_parts])
    target.mkdir(parents=True, exist_ok=True)
    broken = InfraError(f"node {contract.head}: cannot read {folder}; run `make status`")
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        data = io.BytesIO() if process.stdout is None else process.stdout
        try:
            with tarfile.open(fileobj=data, mode="r|") as tar:
                unpack(tar, target, lambda text: print(f"not fetched: {text}", file=sys.stderr))
        except tarfile.ReadError:
            raise broken from None
    if process.returncode:
        raise broken
