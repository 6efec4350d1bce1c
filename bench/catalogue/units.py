"""A network as a graph of units between which it can be cut: one tensor passes from each unit to the next.

A unit is what the torch model has as an element of its sequence: a convolution with what follows it, a residual or
Inception block, a transformer block, a linear layer. A cut inside a residual block would pass two tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from bench.catalogue import models
from bench.catalogue.layers import Layer
from bench.worker.model_sizes import TRANSFORMERS, VIT_B16, Size
from cluster.core.errors import UserError

if TYPE_CHECKING:
    import networkx as nx

# Layers outside of blocks, by the unit that they belong to.
OUTSIDE = {
    "bn1": "conv1",
    **dict.fromkeys(("wte", "wpe", "patches", "class_token", "positions"), "embeddings"),
    **dict.fromkeys(("ln_f", "lm_head", "norm", "pooler", "transform", "decoder", "next_sentence"), "head"),
}


@dataclass(frozen=True)
class Unit:
    name: str
    layers: tuple[Layer, ...]
    inputs: int  # values per sample that it gets from the unit before
    outputs: int  # values per sample that the next unit gets; 0: the last unit

    @property
    def macs(self) -> int:
        return sum(layer.macs for layer in self.layers)

    @property
    def parameters(self) -> int:
        return sum(sum(layer.parameters) for layer in self.layers)

    @property
    def halo(self) -> int:
        """Values per sample that cross one cut between two tiles of the image, forward, both ways together."""
        return sum(layer.halo for layer in self.layers)


def unit_name(layer: str) -> str:
    found = re.match(r"[^.]+(\.\d+)?", layer)
    name = found[0] if found else layer
    return OUTSIDE.get(name, name)


def size_of(model: models.Model) -> Size | None:
    """None if the network is not a transformer."""
    return TRANSFORMERS.get(model.name, VIT_B16 if model.name == "vit-b16" else None)


@cache
def of(name: str, seq_len: int | None = None) -> tuple[Unit, ...]:
    """The units in forward order."""
    model = models.get(name, seq_len)
    if models.is_file(name):
        raise UserError(
            f"model: {name} does not say what passes between its layers; use one of {', '.join(models.NAMES)}"
        )
    groups = [(key, tuple(found)) for key, found in groupby(model.layers, lambda layer: unit_name(layer.name))]
    size = size_of(model)
    if size is not None:
        # Between transformer blocks every token passes on its state.
        state = size.hidden * (model.tokens or size.positions)
        inputs = [model.tokens or 3 * model.input_pixels**2, *[state] * (len(groups) - 1)]
    else:
        inputs = [layers[0].inputs for _, layers in groups]
    return tuple(
        Unit(key, layers, given, following)
        for (key, layers), given, following in zip(groups, inputs, [*inputs[1:], 0], strict=True)
    )


def tied(name: str, seq_len: int | None = None) -> int:
    """Parameters that the first and the last unit share; 0 for most networks."""
    size = TRANSFORMERS.get(models.get(name, seq_len).name)
    return size.vocabulary * size.hidden if size else 0


def graph(name: str, seq_len: int | None = None) -> nx.DiGraph[int]:
    """Nodes are positions in forward order. An edge has the values that it passes per sample and per step."""
    units = of(name, seq_len)
    # It takes longer to import than a prediction.
    import networkx as nx

    found: nx.DiGraph[int] = nx.DiGraph()
    for at, unit in enumerate(units):
        found.add_node(at, unit=unit)
    for before, after in pairwise(range(len(units))):
        found.add_edge(before, after, sample=units[before].outputs, step=0)
    if shared := tied(name, seq_len):
        # Both ends hold the table and add up its gradient once per step.
        last = len(units) - 1
        found.add_edge(0, last, sample=0, step=shared)
    return found


def crossing(network: nx.DiGraph[int], before: Collection[int]) -> tuple[int, int]:
    """Values per sample and per step that leave a set of units for the others."""
    import networkx as nx

    edges = [network.edges[edge[:2]] for edge in nx.edge_boundary(network, before)]
    return sum(edge["sample"] for edge in edges), sum(edge["step"] for edge in edges)
