"""The `cluster` command, which make's deploy, status, scale, shell, doctor and destroy call."""

from __future__ import annotations

import argparse
import sys

from cluster import artefacts, cost, doctor, lab, lifecycle, preview
from cluster.core import paths
from cluster.core.errors import InfraError, UserError
from cluster.providers.baremetal import adopt


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="cluster", description="Bring a Horovod cluster up, look after it, take it down."
    )
    parser.add_argument("--env", default="local", help="environment: a folder in inventories/ (default local)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="print the result as JSON")
        return sub

    for name, text in (
        ("deploy", "create or repair the cluster, configure and validate it"),
        ("scale", "change the number of nodes; the others go on undisturbed"),
        ("plan", "what a deploy would change, without changing it"),
    ):
        command(name, text).add_argument("--nodes", type=int, help="number of nodes, head included")
    command("status", "what each node is and whether it works")
    command("doctor", "what is missing or broken, and the command that fixes it")
    command("adopt", "show the host keys of existing machines and pin them")
    command("cost", "what the nodes cost per hour and so far, and the budget")
    command("artefacts", "every package, wheel, image and file with version and checksum, for sites without internet")
    command("lab", "where the cluster's JupyterLab is and where its token is kept").add_argument(
        "--show-token", action="store_true", help="print the token itself"
    )
    command("destroy", "remove every node, network, key and state of the environment")
    command("renew", "keep the nodes of a testbed for longer")
    command("training-image", "make the container image that GPULab jobs and containers on nodes run").add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="what its Horovod is compiled for (default cuda)"
    )
    command("clean", "remove cached images and packages")
    command("shell", "log in to a node").add_argument("node", nargs="?", default="head")
    args = parser.parse_args(argv)
    try:
        paths.require_checkout()
        if args.command in ("deploy", "scale"):
            lifecycle.deploy(args.env, args.nodes, args.json)
            return 0
        if args.command == "status":
            return lifecycle.status(args.env, args.json)
        if args.command == "doctor":
            return doctor.run(args.env, args.json)
        if args.command == "plan":
            return preview.run(args.env, args.nodes)
        if args.command == "adopt":
            return adopt.run(args.env)
        if args.command == "cost":
            return cost.run(args.env, args.json)
        if args.command == "artefacts":
            return artefacts.run(args.env, args.json)
        if args.command == "lab":
            return lab.run(args.env, args.show_token, args.json)
        if args.command == "destroy":
            lifecycle.destroy(args.env)
        elif args.command == "renew":
            lifecycle.renew(args.env)
        elif args.command == "training-image":
            lifecycle.training_image(args.env, args.device)
        elif args.command == "clean":
            lifecycle.clean(args.env)
        else:
            lifecycle.shell(args.env, args.node)
        return 0
    except (UserError, InfraError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            "cluster: interrupted; `make deploy` goes on from here, `make destroy` removes everything", file=sys.stderr
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
