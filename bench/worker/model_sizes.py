"""Sizes of the networks that are built from equal blocks. The catalogue and the torch models both build from them.

Standard library only, as bench.worker.protocol.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

BERT_VOCABULARY, BERT_POSITIONS = 30522, 512
GPT2_VOCABULARY, GPT2_POSITIONS = 50257, 1024


@dataclass(frozen=True)
class Size:
    """Width and number of the blocks, and the words and positions that the embeddings know."""

    hidden: int
    blocks: int
    vocabulary: int
    positions: int

    @property
    def heads(self) -> int:
        return self.hidden // 64


TRANSFORMERS = {
    "bert-base": Size(768, 12, BERT_VOCABULARY, BERT_POSITIONS),
    "bert-large": Size(1024, 24, BERT_VOCABULARY, BERT_POSITIONS),
    "gpt2": Size(768, 12, GPT2_VOCABULARY, GPT2_POSITIONS),
    "gpt2-medium": Size(1024, 24, GPT2_VOCABULARY, GPT2_POSITIONS),
    "gpt2-498m": Size(1536, 16, 51200, GPT2_POSITIONS),
}
VIT_B16 = Size(768, 12, 0, 197)
VIT_PATCH = 16

# Expansion, kernel, stride, outputs and repeats of each stage.
Stage = tuple[int, int, int, int, int]
MOBILENET_V2: tuple[Stage, ...] = (
    *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 3, 2, 32, 3), (6, 3, 2, 64, 4)),
    *((6, 3, 1, 96, 3), (6, 3, 2, 160, 3), (6, 3, 1, 320, 1)),
)
EFFICIENTNET: tuple[Stage, ...] = (
    *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
    *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
)
# Input pixels, factor on the channels and factor on the repeats.
EFFICIENTNETS = {"efficientnet-b0": (224, 1.0, 1.0), "efficientnet-b4": (380, 1.4, 1.8)}


def channels(value: float) -> int:
    """The nearest multiple of 8 that is not more than a tenth smaller."""
    rounded = max(8, int(value + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * value else rounded


def blocks(stages: tuple[Stage, ...], width: float, depth: float) -> Iterator[tuple[int, int, int, int]]:
    """Expansion, kernel, stride and outputs of each block."""
    for expansion, kernel, stride, out, repeats in stages:
        for repeat in range(math.ceil(repeats * depth)):
            yield expansion, kernel, 1 if repeat else stride, channels(out * width)
