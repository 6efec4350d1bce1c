"""Which samples a rank uses in an epoch, and in which order: every sample exactly once over all ranks.

The shards of an epoch are shuffled and laid end to end. Each rank takes one contiguous share, so it reads shards from
start to end and shares at most its first and last shard with other ranks. A share is divided into windows that fit in
memory, and the samples of a window are shuffled. The order depends only on (seed, epoch, rank, ranks), never on timing,
so a run can resume anywhere.
"""

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Policy = Literal["drop", "pad"]


@dataclass(frozen=True)
class Piece:
    """Samples first to last (exclusive) of a shard."""

    shard: int
    first: int
    last: int


@dataclass(frozen=True)
class Window:
    """Samples that are read before the first of them is used, and the order in which they are used."""

    pieces: tuple[Piece, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class SampleOrder:
    """The samples of one rank in one epoch; `counts` are the samples per shard."""

    counts: tuple[int, ...]
    seed: int
    epoch: int
    rank: int
    ranks: int
    batch: int
    window: int
    policy: Policy = "drop"

    @property
    def share(self) -> tuple[int, int]:
        """First and last (exclusive) position of the rank in the epoch's sequence of samples."""
        total = sum(self.counts)
        return total * self.rank // self.ranks, total * (self.rank + 1) // self.ranks

    @property
    def batches(self) -> int:
        """Batches per epoch. All ranks have the same number, because a collective waits for every rank.

        drop leaves out the samples after the last full batch, different ones in each epoch; pad fills the last batch
        with repeated samples of the same rank.
        """
        total = sum(self.counts)
        smallest, largest = total // self.ranks, -(-total // self.ranks)
        return smallest // self.batch if self.policy == "drop" else -(-largest // self.batch)

    def shards(self) -> list[int]:
        """Shard numbers in the order of this epoch."""
        numbers = list(range(len(self.counts)))
        random.Random(f"{self.seed}/{self.epoch}/shards").shuffle(numbers)
        return numbers

    def windows(self) -> Iterator[Window]:
        begin, end = self.share
        shards = self.shards()
        ends = list(accumulate(self.counts[number] for number in shards))
        for low in range(begin, end, self.window):
            high = min(low + self.window, end)
            order = list(range(high - low))
            random.Random(f"{self.seed}/{self.epoch}/{low}").shuffle(order)
            yield Window(tuple(self.pieces(shards, ends, low, high)), tuple(order))

    def pieces(self, shards: list[int], ends: list[int], low: int, high: int) -> Iterator[Piece]:
        """The parts of shards at positions low to high."""
        while low < high:
            place = bisect_right(ends, low)
            number = shards[place]
            start = ends[place] - self.counts[number]
            stop = min(high, ends[place])
            yield Piece(number, low - start, stop - start)
            low = stop
