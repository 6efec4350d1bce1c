"""What an answer takes for granted, in one line: every command that predicts prints it."""

from __future__ import annotations

from collections.abc import Sequence

from bench.catalogue import interconnect
from bench.predict.inputs import Setup


def text(setups: Sequence[Setup]) -> str:
    """Of configurations that differ in the size of the cluster, the nodes and the network."""
    first = setups[0]
    sent = f"{first.precision}, " if first.precision else ""
    hint = any(one.gpus_per_node > 1 and one.interconnect == "auto" for one in setups)
    parts = [
        *dict.fromkeys(map(inside, setups)),
        *(["other links: --interconnect"] if hint else []),
        first.collective,
        f"{sent}gradients of {first.gradient_bytes:g} bytes",
    ]
    return "assumed: " + "; ".join(parts)


def inside(setup: Setup) -> str:
    if setup.gpus_per_node == 1:
        return "one GPU per node"
    return f"{interconnect.NAMES[setup.intra]} inside a node ({setup.intra_gbytes:g} GB/s)"
