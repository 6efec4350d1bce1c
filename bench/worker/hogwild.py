"""Hogwild: the ranks of one node share the weights and add their updates without a lock (Niu et al. 2011).

The weights are in memory without a name, which every rank maps and which is gone with the last of them. Of two
additions to the same element at the same moment one may get lost.
"""

import mmap
import os

import torch

from bench.worker.weights import WeightEngine


class HogwildEngine(WeightEngine):
    overlaps = True

    def adopt(self, weights: dict[str, torch.Tensor], period: int, moving_rate: float, scale: float) -> None:
        """Put the weights of rank 0 into shared memory and let every rank's tensors refer to it."""
        super().adopt(weights, period, moving_rate, scale)
        count = sum(weight.numel() for weight in weights.values())
        size = 8 * self.size + 4 * count
        own = os.memfd_create("hogwild") if self.rank == 0 else -1
        if self.rank == 0:
            os.truncate(own, size)
        path = self.broadcast(f"/proc/{os.getpid()}/fd/{own}")
        descriptor = os.open(path, os.O_RDWR)
        memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self.barrier()
        if own >= 0:
            os.close(own)
        # How many updates each rank has added: every rank writes its own number only.
        self.updates = torch.frombuffer(memory, dtype=torch.int64, count=self.size)
        shared = torch.frombuffer(memory, dtype=torch.float32, count=count, offset=8 * self.size)
        for weight, part in zip(weights.values(), shared.split([one.numel() for one in weights.values()]), strict=True):
            if self.rank == 0:
                part.copy_(weight.flatten())
            weight.set_(part.untyped_storage(), part.storage_offset(), weight.shape)
        self.barrier()

    def begin(self, scale: float) -> None:
        self.seen = int(self.updates.sum())

    def wait(self) -> None:
        self.staleness[int(self.updates.sum()) - self.seen] += 1
        self.updates[self.rank] += 1
        self.steps += 1

    def check(self) -> None:
        expected = sum(self.gather(self.steps))
        if (found := int(self.updates.sum())) != expected:
            raise RuntimeError(f"the shared memory counts {found} updates of {expected}")
        self.expect_equal_weights()
