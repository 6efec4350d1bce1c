"""Plan a cluster, its data path, a training run or a data transfer before paying for it."""

from __future__ import annotations

import argparse

from bench.sizing import accuracy, cluster, datapath, network, placement, training, transfer

# Name -> module with configure(parser) and run(args) -> exit code, as for bench itself.
PLANS = {
    "cluster": cluster,
    "network": network,
    "datapath": datapath,
    "placement": placement,
    "training-time": training,
    "time-to-accuracy": accuracy,
    "transfer": transfer,
}


def configure(parser: argparse.ArgumentParser) -> None:
    plans = parser.add_subparsers(dest="plan", required=True, metavar="PLAN")
    for name, module in PLANS.items():
        text = (module.__doc__ or "").strip().splitlines()[0]
        sub = plans.add_parser(name, help=text, description=text)
        module.configure(sub)
        sub.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    code: int = PLANS[args.plan].run(args)
    return code
