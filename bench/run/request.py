"""What `bench run` was asked for: options, checked before anything is copied, and the launch that they give."""

from __future__ import annotations

import argparse
import itertools
import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from bench.plan import unfold
from bench.run import elastic, source
from bench.run.elastic import Range
from bench.sweep import launch as launchers
from bench.sweep.launch import Launch
from cluster.core import files, worker_files
from cluster.core.config import Cluster, layout
from cluster.core.contract import Contract
from cluster.core.errors import UserError
from cluster.tuning import Tuning

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
GRID_VALUE = re.compile(r"[A-Za-z0-9._+-]+")
MOST_POINTS = 1000
# Linux allows 255 bytes.
LONGEST_FOLDER = 200
# Why nodes must not shut themselves down, except on AWS, which bills only the disks of stopped instances.
NOT_STOPPABLE = {"local": "local nodes cost nothing, and podman starts them again; use --then destroy"}


@dataclass(frozen=True)
class Request:
    words: tuple[str, ...]
    folder: Path
    nodes: tuple[str, ...]
    slots: int
    engine: str
    container: str | None = None
    requirements: str = ""
    variables: dict[str, str] = field(default_factory=dict, repr=False)
    max_restarts: int = 0
    grid: tuple[tuple[str, tuple[str, ...]], ...] = ()
    each_nodes: int = 0
    elastic: Range | None = None
    then: Literal["stop", "destroy"] | None = None
    resume: str | None = None
    id: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}")

    def groups(self) -> list[tuple[str, ...]]:
        """The nodes of each launch: all of them, or each_nodes at a time."""
        if not self.grid:
            return [self.nodes]
        count = len(self.nodes) // self.each_nodes
        return [self.nodes[at * self.each_nodes :][: self.each_nodes] for at in range(count)]

    def points(self) -> list[dict[str, Any]]:
        """One run, or one per combination of the grid, in a folder of its own."""
        if not self.grid:
            return [{"name": ".", "words": list(self.words), "values": {}}]
        names = [name for name, _ in self.grid]
        combinations = itertools.product(*(values for _, values in self.grid))
        return [
            {
                "name": folder_name(dict(zip(names, values, strict=True))),
                "words": [*self.words, *(w for n, v in zip(names, values, strict=True) for w in (f"--{n}", v))],
                "values": dict(zip(names, values, strict=True)),
            }
            for values in combinations
        ]


def folder_name(values: dict[str, str]) -> str:
    """Of one combination of a grid."""
    return ",".join(f"{name}={value}" for name, value in values.items())


def split_env(values: Sequence[str]) -> tuple[str, dict[str, str]]:
    """--env E chooses the environment, --env K=V gives a variable: an environment's name has no =."""
    names = [value for value in values if "=" not in value]
    variables = {}
    for name, _, value in (text.partition("=") for text in values if "=" in text):
        if not VARIABLE.fullmatch(name):
            raise UserError("--env: a variable's name has letters, digits and _; write --env NAME=VALUE")
        if "\0" in value:
            raise UserError(f"--env {name}: the value contains a zero byte; remove it")
        variables[name] = value
    return names[-1] if names else "local", variables


def grid(texts: Sequence[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        parts = tuple(values.split(","))
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or not all(map(GRID_VALUE.fullmatch, parts)):
            raise UserError(f"--grid {text[:60]}: write an option of the script and its values, as in lr=0.1,0.2")
        found[name] = tuple(dict.fromkeys(parts))
    points = 1
    for parts in found.values():
        points *= len(parts)
    if points > MOST_POINTS:
        raise UserError(f"--grid: {points} combinations; give at most {MOST_POINTS}")
    if (longest := len(folder_name({name: max(parts, key=len) for name, parts in found.items()}))) > LONGEST_FOLDER:
        raise UserError(f"--grid: a folder's name would have {longest} characters; give shorter values")
    return tuple(found.items())


def requirements(name: str) -> str:
    """The text of a requirements file. The nodes get this file alone."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"--requirements {name}: no such file")
    text = files.text(path)
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*(-r|-c|-e|--requirement|--constraint|--editable|\.{1,2}/|/|file:)", line):
            raise UserError(f"--requirements {name}: line {number} names another file; write its packages here")
    return text


def make(args: argparse.Namespace, contract: Contract, variables: dict[str, str]) -> Request:
    """Check every option against the cluster. Raises UserError in one line."""
    if contract.ssh is None:
        raise UserError(f"--env: {contract.provider} has jobs and no nodes to run a script on; use another environment")
    if contract.storage.backend == "none":
        raise UserError("cluster.storage.backend: none, but a run needs a folder that all nodes share; choose another")
    words = tuple(args.words[1:] if args.words[:1] == ["--"] else args.words)
    folder = Path(args.folder).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"--folder {args.folder}: no such folder")
    source.check_words(folder, words)
    if contract.executor == "slurm" and (args.min_nodes or args.max_nodes):
        raise UserError(
            "--min-nodes: a Slurm job cannot change its nodes; leave it out, or use a cluster without Slurm"
        )
    names = contract.compute
    nodes = elastic.chosen(args, len(names))
    count = args.nodes or len(names)
    if count > len(names):
        raise UserError(f"--nodes {count}: the cluster has {len(names)}; give fewer, or run `make scale NODES={count}`")
    gpus = min(contract.nodes[name].gpus for name in names[:count])
    if gpus and args.gpus_per_node and args.gpus_per_node > gpus:
        raise UserError(f"--gpus-per-node {args.gpus_per_node}: the nodes have {gpus}")
    if args.requirements and args.container:
        raise UserError("--requirements: not with --container; install the packages in the image")
    values = grid(args.grid or [])
    if args.each_nodes and not values:
        raise UserError("--each-nodes: only with --grid")
    if values and (args.each_nodes or 1) > count:
        raise UserError(f"--each-nodes {args.each_nodes}: the run has {count} nodes")
    if args.then == "destroy" and args.detach:
        raise UserError("--then destroy: needs this machine at the end, so not with --detach; use --then stop")
    if args.then == "stop" and contract.provider != "aws":
        reason = NOT_STOPPABLE.get(contract.provider, "its nodes would need a person to start them again")
        raise UserError(f"--then stop: not for {contract.provider}: {reason}")
    return Request(
        words=words,
        folder=folder,
        nodes=tuple(names[:count]),
        slots=args.gpus_per_node or gpus or 1,
        engine=args.engine,
        container=args.container,
        requirements=requirements(args.requirements) if args.requirements else "",
        variables=variables,
        max_restarts=args.max_restarts,
        grid=values,
        each_nodes=args.each_nodes or 1,
        elastic=nodes,
        then=args.then,
        resume=args.resume,
    )


def check_spot(then: str | None, cluster: Cluster) -> None:
    """A one-time spot instance that shuts down is terminated, and its disks go with it."""
    if then == "stop" and cluster.aws and cluster.aws.spot:
        reason = "spot instances cannot be stopped, only terminated, and the share's files would be lost"
        raise UserError(f"--then stop: {reason}; use --then destroy, which fetches the outputs first")


def launch(
    request: Request, contract: Contract, tuned: dict[str, Tuning], hosts: Sequence[str], words: Sequence[str]
) -> Launch:
    """The launch that a sweep would use on the active fabric, without the scale model."""
    name = contract.active_fabric
    fabric, settings = contract.fabrics[name], unfold.tuning_of(contract, name, tuned)
    cuda = contract.nodes[hosts[0]].gpus > 0
    horovod = "horovod-mpi" if cuda else settings.engine
    share = contract.storage.path
    return Launch(
        run=request.id,
        engine="ddp" if request.engine == "ddp" else horovod,
        hosts=tuple(hosts),
        slots=request.slots,
        subnet=contract.subnet(name),
        interface=contract.interface(contract.head, name),
        transport=fabric.transport,
        words=tuple(words),
        settings=settings,
        cuda=cuda,
        container=request.container,
        torchrun=request.engine == "ddp",
        volumes=(f"{share}:{share}",),
    )


def argv(request: Request, contract: Contract, launch: Launch, hosts_file: str | None = None) -> list[str]:
    """The command on the head. Without the file, which lives as long as a run, the launcher takes nodes as they are."""
    if not request.elastic:
        return launchers.salloc(launch) if contract.executor == "slurm" else launchers.argv(launch)
    launcher = elastic.torchrun if launch.torchrun else elastic.horovodrun
    return launcher(launch, request.elastic, hosts_file)


def container_command(request: Request, contract: Contract, tuned: dict[str, Tuning], workdir: str) -> list[str]:
    """podman's part of a rank's command. The label finds containers that outlive podman."""
    if not request.container:
        return []
    command = launch(request, contract, tuned, request.nodes, request.words).container_command
    return [*command[:-1], f"--label=run={request.id}", f"--workdir={workdir}", command[-1]]


def record(request: Request, contract: Contract, tuned: dict[str, Tuning], venv: str | None = None) -> dict[str, Any]:
    """run.json: what the nodes need, and what is kept. It has the names of --env and no values."""
    share = contract.storage.path
    folder = f"{share}/runs/{request.id}"
    # A node that joins an elastic run finds the worker on the share.
    rank = ["python3", f"{folder}/worker" if request.elastic else worker_files.folder(), "run_rank"]
    groups = []
    for hosts in request.groups():
        # The rank's command is inside the container; what starts it is not.
        one = replace(launch(request, contract, tuned, hosts, rank), container=None)
        groups.append({"hosts": list(hosts), "argv": argv(request, contract, one, elastic.hosts_file(request.id))})
    return {
        "id": request.id,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(request.words),
        "engine": request.engine,
        "provider": contract.provider,
        "nodes": list(request.nodes),
        "elastic": request.elastic.record() if request.elastic else None,
        "gpus_per_node": request.slots,
        "variables": sorted(request.variables),
        "max_restarts": request.max_restarts,
        "then": request.then,
        "resumes": request.resume,
        "image": request.container,
        "container": container_command(request, contract, tuned, f"{folder}/code"),
        "requirements": request.requirements.splitlines(),
        "path": [f"{folder}/bin" for folder in (venv, layout()["venv"]) if folder],
        "data": f"{share}/datasets",
        "points": request.points(),
        "groups": groups,
    }


def printed(request: Request, contract: Contract, tuned: dict[str, Tuning]) -> list[str]:
    """The command for people who type it themselves: on the head, as the training account, in the copied folder."""
    hidden = [f"{name}=***" for name in request.variables]
    lines = []
    for point, hosts in zip(request.points(), itertools.cycle(request.groups()), strict=False):
        words = [*(["env", *hidden] if hidden else []), *point["words"]]
        lines.append(shlex.join(argv(request, contract, launch(request, contract, tuned, hosts, words))))
    # shlex quotes the stars.
    return [re.sub(r"'(\w+=\*\*\*)'", r"\1", line) for line in lines]
