"""Servers of weights without a barrier: what ps-async and easgd have in common.

Every process is a worker and also serves the blocks that it owns. A worker's message changes the block as soon as it
arrives, whatever the other workers do, and the answer goes back to that worker alone. So each server has one thread
per worker. A worker begins an exchange with the number of its model, because the servers must know the sizes.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.worker.placement import BLOCK_BYTES, Block, blocks
from bench.worker.weights import WeightEngine

END = -1


@dataclass
class Served:
    """A block at its owner: its content, the number of changes so far, and after which change each worker saw it."""

    content: torch.Tensor
    changes: int = 0
    seen: Counter[int] = field(default_factory=Counter)


class ServedEngine(WeightEngine):
    def __init__(self) -> None:
        super().__init__()
        # One group for each direction: a serving thread must not receive the worker's messages.
        self.push, self.pull = self.dist.new_group(backend="gloo"), self.dist.new_group(backend="gloo")
        self.models: list[tuple[list[Block], dict[int, Served]]] = []
        self.moving_rate = 0.0
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.sent: list[tuple[Any, torch.Tensor]] = []
        self.answers: list[tuple[Any, torch.Tensor, Block]] = []
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        self.threads = [threading.Thread(target=self._serve, args=(peer,), daemon=True) for peer in self.peers]
        for thread in self.threads:
            thread.start()

    def adopt(self, weights: dict[str, torch.Tensor], period: int, moving_rate: float, scale: float) -> None:
        super().adopt(weights, period, moving_rate, scale)
        self.moving_rate = moving_rate
        made = blocks({name: weight.numel() for name, weight in weights.items()}, self.size, BLOCK_BYTES / scale)
        self.block_of = {name: block for block in made for name in block.names}
        served = {block.number: Served(self.flat(block)) for block in made if block.owner == self.rank}
        self.models.append((made, served))
        # No update may arrive before its block is there.
        self.barrier()

    def flat(self, block: Block) -> torch.Tensor:
        return torch.cat([self.weights[name].flatten() for name in block.names])

    def change(self, served: Served, message: torch.Tensor) -> torch.Tensor:
        """What a worker's message does to a block, and the answer. Called under the lock."""
        raise NotImplementedError

    def use(self, block: Block, answer: torch.Tensor) -> None:
        """What the answer does to the worker's weights."""
        raise NotImplementedError

    def _change(self, served: Served, message: torch.Tensor, worker: int) -> torch.Tensor:
        with self.lock:
            # Since this worker's last message, all changes came from others.
            self.staleness[served.changes - served.seen[worker]] += 1
            answer = self.change(served, message)
            served.changes += 1
            served.seen[worker] = served.changes
            return answer

    def _serve(self, worker: int) -> None:
        number = torch.empty(1, dtype=torch.int64)
        try:
            while True:
                self.dist.recv(number, worker, group=self.push, tag=0)
                if int(number) == END:
                    return
                made, served = self.models[int(number)]
                receives, sends = [], []
                # All at once: Gloo sends a message when its receiver is ready, and says so only then.
                for block in made:
                    if block.owner == self.rank:
                        message = torch.empty(block.elements)
                        work = self.dist.irecv(message, worker, group=self.push, tag=1 + block.number)
                        receives.append((work, message, block))
                for work, message, block in receives:
                    work.wait()
                    answer = self._change(served[block.number], message, worker)
                    sends.append((self.dist.isend(answer, worker, group=self.pull, tag=1 + block.number), answer))
                for work, _ in sends:
                    work.wait()
        except RuntimeError as error:
            self.error = error

    def announce(self) -> None:
        """Tell every server which blocks follow."""
        number = torch.tensor([len(self.models) - 1])
        self.sent = [(self.dist.isend(number, peer, group=self.push, tag=0), number) for peer in self.peers]

    def send(self, block: Block, message: torch.Tensor) -> None:
        if block.owner == self.rank:
            own = self.models[-1][1][block.number]
            self.answers.append((None, self._change(own, message, self.rank), block))
            return
        answer = torch.empty(block.elements)
        self.sent.append((self.dist.isend(message, block.owner, group=self.push, tag=1 + block.number), message))
        receive = self.dist.irecv(answer, block.owner, group=self.pull, tag=1 + block.number)
        self.answers.append((receive, answer, block))

    def finish(self) -> None:
        """Wait for all answers and use them."""
        for work, _ in self.sent:
            work.wait()
        for receive, answer, block in self.answers:
            if receive is not None:
                receive.wait()
            self.use(block, answer)
        self.sent, self.answers = [], []
        if self.error:
            raise self.error

    def exchange(self) -> None:
        self.announce()
        for block in self.models[-1][0]:
            self.send(block, self.flat(block))
        self.finish()

    def check(self) -> None:
        """Every worker's message of every exchange changed every block once."""
        expected = sum(self.gather(self.steps // self.period))
        for number, served in self.models[-1][1].items():
            if served.changes != expected:
                raise RuntimeError(f"block {number} was changed {served.changes} times by {expected} messages")

    def close(self) -> None:
        """End the threads first: a thread that runs at interpreter exit can crash the process."""
        for peer in self.peers:
            self.dist.send(torch.tensor([END]), peer, group=self.push, tag=0)
        for thread in self.threads:
            thread.join()
        super().close()
