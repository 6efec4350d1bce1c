"""The `cluster` command; most targets of the Makefile call it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from cluster import artefacts, cache, cost, doctor, environment, lab, lifecycle, preview, price_list, release, transfer
from cluster.core import config, entry, paths
from cluster.core.errors import UserError
from cluster.core.numbers import Whole
from cluster.providers.baremetal import adopt

# Runs a command with its options; returns the exit code, or None for 0.
Run = Callable[[argparse.Namespace], int | None]


def make_parser() -> argparse.ArgumentParser:
    text = "Deploy, inspect and destroy a Horovod cluster."
    parser = entry.Parser(prog="cluster", description=text, epilog=entry.EXIT_CODES)
    parser.add_argument("--env", default="local", help="environment: a folder in inventories/ (default: local)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str, run: Run, json: bool = False, any_env: bool = False) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run, any_env=any_env)
        if json:
            command.add_argument("--json", action="store_true", help="print the result as JSON")
        return command

    def deploy(args: argparse.Namespace) -> None:
        lifecycle.deploy(args.env, args.nodes, args.json, args.yes, args.replace)

    def scale(args: argparse.Namespace) -> None:
        if args.nodes is None:
            raise UserError("--nodes: missing; give the number of nodes, as in `make scale NODES=8`")
        deploy(args)

    text = "print the completed cluster.yml; change nothing"
    for command in (
        changing := add("deploy", "create or repair the cluster, configure it and validate it", deploy, json=True),
        scaling := add("scale", "change the number of nodes; the remaining nodes keep running", scale, json=True),
        add("plan", "show what a deploy would change", lambda args: preview.run(args.env, args.nodes)),
        add("config", text, lambda args: preview.show_config(args.env, args.nodes, args.json), json=True),
    ):
        command.add_argument("--nodes", type=Whole(1, config.MAX_NODES), help="number of nodes, including the head")
    add("status", "state of each node", lambda args: lifecycle.status(args.env, args.json), json=True)
    add("doctor", "list problems and their fixes", lambda args: doctor.run(args.env, args.json), json=True)
    add("adopt", "print the host keys of existing machines and pin them", lambda args: adopt.run(args.env))
    add("cost", "cost per hour, cost so far, and budget", lambda args: cost.run(args.env, args.json), json=True)
    text = "list the prices used in calculations, with date and source"
    command = add("prices", text, lambda args: price_list.run(args.refresh, args.json), json=True, any_env=True)
    command.add_argument("--refresh", action="store_true", help="fetch EC2 on-demand prices; needs AWS credentials")
    text = "list every package, wheel, image and file with version and checksum, for sites without internet access"
    add("artefacts", text, lambda args: artefacts.run(args.env, args.json), json=True)
    text = "address of the cluster's JupyterLab, its certificate and its token file"
    command = add("lab", text, lambda args: lab.run(args.env, args.show_token, args.json), json=True)
    command.add_argument("--show-token", action="store_true", help="print the token itself")
    text = "copy an environment under a new name, with subnets that are free on this machine"
    command = add("env", text, lambda args: environment.run(args.name, args.source), any_env=True)
    command.add_argument("name", nargs="?", default="", help="name of the new environment and of its cluster")
    command.add_argument("--from", dest="source", default="local", metavar="ENV", help="original (default: local)")
    text = "remove all nodes, networks, keys and state"
    destroying = add("destroy", text, lambda args: lifecycle.destroy(args.env, args.yes))
    text = "give existing machines back as they were before the first deploy; list the packages that stay"
    releasing = add("release-hosts", text, lambda args: release.run(args.env, args.yes))
    text = "replace nodes that a deploy cannot keep; all data on them is lost"
    for command in (changing, scaling):
        command.add_argument("--replace", action="store_true", help=text)
    for command in (changing, scaling, destroying, releasing):
        command.add_argument("--yes", action="store_true", help="remove nodes even if a run is in progress on them")
    add("renew", "extend the lifetime of the nodes", lambda args: lifecycle.renew(args.env))
    text = "build the container image that GPULab jobs and containers on nodes run"
    command = add("training-image", text, lambda args: lifecycle.training_image(args.env, args.device))
    text = "device that Horovod is compiled for (default: cuda)"
    command.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help=text)
    add("clean", "remove cached images and packages that nothing uses", lambda args: cache.run(args.env))
    text = "log in to a node as the training account"
    command = add("shell", text, lambda args: lifecycle.shell(args.env, args.node, args.admin))
    command.add_argument("node", nargs="?", default="head", help="name of the node (default: head)")
    command.add_argument("--admin", action="store_true", help="log in as the account that may use sudo")
    text = "copy a file or folder of this machine to the share"
    command = add("put", text, lambda args: transfer.put(args.env, args.source, args.target))
    command.add_argument("source", nargs="?", default="", help="file or folder; with / at its end, its content")
    command.add_argument("target", nargs="?", default="datasets", help="path on the share (default: datasets)")
    text = "copy a file or folder of the share to this machine"
    command = add("get", text, lambda args: transfer.get(args.env, args.source, args.target))
    command.add_argument("source", nargs="?", default="", help="path on the share; with / at its end, its content")
    command.add_argument("target", nargs="?", default=".", help="folder on this machine (default: the current one)")
    return parser


def run(argv: list[str] | None) -> int:
    args = make_parser().parse_args(argv)
    paths.require_checkout()
    if not args.any_env:
        environment.require(args.env)
    return args.run(args) or 0


def main(argv: list[str] | None = None) -> int:
    interrupted = "interrupted; `make deploy` continues from here, `make destroy` removes everything"
    return entry.guard("cluster", lambda: run(argv), interrupted)


if __name__ == "__main__":
    sys.exit(main())
