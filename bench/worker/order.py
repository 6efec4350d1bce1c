"""Which rank sees which sample when: every sample exactly once per epoch, in an order that only the seed decides.

An epoch's shards are put in a random order and end to end; each rank takes one stretch of that line, so it reads
shards from start to end and shares at most its first and its last with others. A stretch is cut into windows that fit
in memory and are shuffled there. Nothing depends on timing: (seed, epoch, rank, ranks) gives the order, so a run
resumes anywhere.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Policy = Literal["drop", "pad"]


@dataclass(frozen=True)
class Piece:
    """Samples first to last of a shard."""

    shard: int
    first: int
    last: int


@dataclass(frozen=True)
class Window:
    """What is read before anything of it is used: some pieces, and the order of their samples."""

    pieces: tuple[Piece, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """The samples of one rank in one epoch."""

    counts: tuple[int, ...]
    seed: int
    epoch: int
    rank: int
    ranks: int
    batch: int
    window: int
    policy: Policy = "drop"

    @property
    def stretch(self) -> tuple[int, int]:
        """The rank's part of the line; together the parts are the whole line."""
        total = sum(self.counts)
        return total * self.rank // self.ranks, total * (self.rank + 1) // self.ranks

    @property
    def batches(self) -> int:
        """The same for all ranks, or the last step would wait for ever.

        drop leaves out the samples that fill no batch, others in each epoch; pad repeats some of the rank's own.
        """
        total = sum(self.counts)
        smallest, largest = total // self.ranks, -(-total // self.ranks)
        return smallest // self.batch if self.policy == "drop" else -(-largest // self.batch)

    def shards(self) -> list[int]:
        """The line: shard numbers in this epoch's order."""
        numbers = list(range(len(self.counts)))
        random.Random(f"{self.seed}/{self.epoch}/shards").shuffle(numbers)
        return numbers

    def windows(self) -> list[Window]:
        begin, end = self.stretch
        line = self.shards()
        ends = list(accumulate(self.counts[number] for number in line))
        out = []
        for low in range(begin, end, self.window):
            high = min(low + self.window, end)
            order = list(range(high - low))
            random.Random(f"{self.seed}/{self.epoch}/{low}").shuffle(order)
            out.append(Window(tuple(self.pieces(line, ends, low, high)), tuple(order)))
        return out

    def pieces(self, line: list[int], ends: list[int], low: int, high: int) -> list[Piece]:
        out = []
        while low < high:
            place = bisect_right(ends, low)
            number = line[place]
            start = ends[place] - self.counts[number]
            stop = min(high, ends[place])
            if stop > low:
                out.append(Piece(number, low - start, stop - start))
            low = stop
        return out
