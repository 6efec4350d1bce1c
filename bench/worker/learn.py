"""Train the small network of `bench converge` to a target accuracy, in the time of a larger one.

The mathematics is real. A step takes as long as the emulated device computes, each piece of the weights is sent when
that device would have the same share of its gradients' bytes, and the link is slower by the ratio of their bytes.
"""

import copy
import hashlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn

from bench.worker import counters, rank, small_network, weight_devices
from bench.worker.accelerator import Accelerator
from bench.worker.devices import FORWARD_SHARE
from bench.worker.engines import Engine
from bench.worker.node_link import sleep_until
from bench.worker.protocol import Gradient, LaunchSpec, LearnDone, LearnSpec, Progress, Spec, emit

# All ranks meet after this many measurements of the accuracy, to decide whether the target is reached.
MEASUREMENTS = 4
# Each piece of the small network costs this machine a message.
MOST_PIECES = 24


class Images:
    def __init__(self, path: str) -> None:
        with numpy.load(path) as file:
            self.x, self.test_x = (self.normal(file[name]) for name in ("x", "test_x"))
            self.y, self.test_y = (torch.from_numpy(file[name].astype("int64")) for name in ("y", "test_y"))
        self.classes, self.pixels = int(self.y.max()) + 1, self.x.shape[-1]

    @staticmethod
    def normal(images: Any) -> torch.Tensor:
        return torch.from_numpy(images.astype("float32")).sub_(127.5).div_(64)

    def batches(self, seed: int, one: int, size: int, batch: int) -> Iterator[torch.Tensor]:
        """This rank's images of each step, without end. All ranks together go through the set, epoch by epoch."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.y), generator=generator)
        start = 0
        while True:
            while len(order) < size * batch:
                order = torch.cat([order, torch.randperm(len(self.y), generator=generator)])
            yield order[one * batch : (one + 1) * batch]
            start, order = start + size * batch, order[size * batch :]


def cut(elements: int, profile: list[Gradient]) -> list[tuple[int, float]]:
    """Elements of the small network's pieces and when each is ready: cut in proportion to the model's gradients.

    Neighbours are merged until a piece has its share, so owners, messages and overlap are like those of the model.
    """
    total = sum(gradient.elements for gradient in profile)
    pieces: list[tuple[int, float]] = []
    seen = filled = start = 0
    for number, gradient in enumerate(profile, start=1):
        seen, filled = seen + gradient.elements, filled + gradient.elements
        end = round(elements * seen / total)
        if (filled * MOST_PIECES >= total or number == len(profile)) and end > start:
            pieces.append((end - start, gradient.ready))
            start, filled = end, 0
    return pieces


class Trainer:
    def __init__(self, engine: Any, run: LearnSpec, images: Images, profile: list[Gradient]) -> None:
        self.engine, self.run, self.images = engine, run, images
        self.model = small_network.make(images.pixels, images.classes, run.seed)
        # One vector in the order of backward, of which parameters and pieces are views.
        self.backward = list(reversed(list(self.model.parameters())))
        self.flat = torch.cat([parameter.data.flatten() for parameter in self.backward])
        for parameter, part in zip(self.backward, self.split(self.flat), strict=True):
            parameter.data = part.view_as(parameter)
        self.momentum = torch.zeros_like(self.flat)
        pieces = cut(self.flat.numel(), profile)
        self.sizes, self.ready = [size for size, _ in pieces], [ready for _, ready in pieces]
        self.names = [f"learn.{number}" for number in range(len(pieces))]
        self.batches = images.batches(run.seed, engine.rank, engine.size, run.batch)
        self.steps = self.overruns = 0
        if engine.holds_weights:
            weights = dict(zip(self.names, self.flat.split(self.sizes), strict=True))
            engine.adopt(weights, run.period, run.moving_rate, run.scale)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return list(flat.split([parameter.numel() for parameter in self.backward]))

    @property
    def samples(self) -> int:
        return self.steps * self.run.batch * int(self.engine.size)

    def rate(self) -> float:
        warm: float = (self.samples + self.run.batch * self.engine.size) / max(1, self.run.warmup_samples)
        return self.run.learning_rate * min(1.0, warm)

    def step(self) -> None:
        start = time.perf_counter()
        self.engine.begin(self.run.scale)
        chosen = next(self.batches)
        loss = nn.functional.cross_entropy(self.model(self.images.x[chosen]), self.images.y[chosen])
        gradients = torch.autograd.grad(loss, self.backward)
        total, rate = torch.cat([gradient.flatten() for gradient in gradients]), self.rate()
        if self.engine.holds_weights:
            total = self.momentum.mul_(weight_devices.MOMENTUM).add_(total) * -rate
        self.overruns += time.perf_counter() - start > self.run.compute_s
        forward = self.run.compute_s * FORWARD_SHARE
        for name, piece, ready in zip(self.names, total.split(self.sizes), self.ready, strict=True):
            sleep_until(start + forward + ready * (self.run.compute_s - forward))
            self.engine.submit(name, piece)
        sleep_until(start + self.run.compute_s)
        self.engine.wait()
        if not self.engine.holds_weights:
            self.momentum.mul_(weight_devices.MOMENTUM).add_(total, alpha=1 / self.engine.size)
            self.flat.sub_(self.momentum, alpha=rate)
        self.steps += 1

    def snapshot(self) -> torch.Tensor:
        return torch.cat(list(self.engine.average().values())) if self.engine.holds_weights else self.flat.clone()

    def accuracy(self, flat: torch.Tensor) -> float:
        judged = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter, part in zip(reversed(list(judged.parameters())), self.split(flat), strict=True):
                parameter.copy_(part.view_as(parameter))
            found = judged(self.images.test_x).argmax(1)
        return float((found == self.images.test_y).float().mean())


def digest(flat: torch.Tensor) -> str:
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def learn(engine: Engine, run: LearnSpec, images: Images, profile: list[Gradient]) -> None:
    rank.set_rate(run, engine.local_rank)
    trainer = Trainer(engine, run, images, profile)
    seconds: list[float] = []
    samples: list[int] = []
    accuracy: list[float] = []
    clock = 0.0
    last = trainer.flat
    engine.barrier()
    before = counters.sent_bytes()
    while True:
        engine.barrier()
        begin, taken = time.perf_counter(), []
        for number in range(MEASUREMENTS * run.evaluate):
            trainer.step()
            if (number + 1) % run.evaluate == 0:
                now = clock + (time.perf_counter() - begin) * run.speed
                taken.append((now, trainer.samples, trainer.snapshot()))
        # The clock stands while the accuracy is measured.
        clock += max(engine.gather(time.perf_counter() - begin)) * run.speed
        if engine.rank == 0:
            seconds += [moment for moment, _, _ in taken]
            samples += [count for _, count, _ in taken]
            accuracy += [trainer.accuracy(flat) for _, _, flat in taken]
            last = taken[-1][2]
            emit(Progress(run.id, trainer.samples / clock))
        ended = bool(accuracy) and (max(accuracy) >= run.target or trainer.samples >= run.max_samples)
        if engine.broadcast(ended):
            break
    after = counters.sent_bytes()
    sent = {nic: (after[nic] - count) / trainer.steps for nic, count in before.items() if nic in after}
    reports = engine.gather((socket.gethostname(), sent, trainer.overruns, weight_devices.staleness(engine)))
    if engine.holds_weights:
        trainer.engine.check()
    if engine.rank == 0:
        emit(
            LearnDone(
                id=run.id,
                seconds=seconds,
                samples=samples,
                accuracy=accuracy,
                steps=trainer.steps,
                elements=last.numel(),
                sent={node: bytes_sent for node, bytes_sent, _, _ in reports},
                staleness=merged([counts for *_, counts in reports]),
                overrun=sum(overruns for _, _, overruns, _ in reports) / trainer.steps / len(reports),
                digest=digest(last),
            )
        )


def merged(counts: list[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for updates, count in one.items():
            total[updates] = total.get(updates, 0) + count
    return total


def learn_all(engine: Engine, device: Accelerator, spec: Spec, launch: LaunchSpec) -> None:
    images = Images(launch.data)
    for run in launch.learns:
        learn(engine, run, images, spec.gradients[launch.model])


def main() -> None:
    rank.serve(learn_all)
