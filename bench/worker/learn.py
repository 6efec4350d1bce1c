"""Train the small network of `bench converge` to a target accuracy, in the time of a larger one.

The mathematics is real. A step takes as long as the emulated device computes, each tensor is sent when that device
would have the same share of its gradients' bytes, and the link is slower by the ratio of the two networks' bytes.
"""

import copy
import hashlib
import socket
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
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


def ready_times(sizes: list[int], profile: list[Gradient]) -> list[float]:
    """When each tensor is ready: when the named model has as large a share of its gradients' bytes."""
    shares = list(accumulate(gradient.elements for gradient in profile))
    total = sum(sizes)
    last = len(profile) - 1
    ends = accumulate(sizes)
    # Half an element less: shares that are equal in theory may differ in the last digit.
    return [profile[min(last, bisect_left(shares, (end - 0.5) / total * shares[-1]))].ready for end in ends]


class Trainer:
    def __init__(self, engine: Any, run: LearnSpec, images: Images, profile: list[Gradient]) -> None:
        self.engine, self.run, self.images = engine, run, images
        self.model = small_network.make(images.pixels, images.classes, run.seed)
        backward = list(reversed(list(self.model.parameters())))
        self.weights = {f"learn.{number}": parameter for number, parameter in enumerate(backward)}
        self.momentum = [torch.zeros_like(parameter) for parameter in backward]
        self.ready = ready_times([parameter.numel() for parameter in backward], profile)
        self.batches = images.batches(run.seed, engine.rank, engine.size, run.batch)
        self.steps = self.overruns = 0
        if engine.holds_weights:
            adopted = {name: parameter.data for name, parameter in self.weights.items()}
            engine.adopt(adopted, run.period, run.moving_rate, run.scale)
            for name, parameter in self.weights.items():
                parameter.data = adopted[name]

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
        gradients = list(torch.autograd.grad(loss, list(self.weights.values())))
        self.overruns += time.perf_counter() - start > self.run.compute_s
        forward = self.run.compute_s * FORWARD_SHARE
        rate, tensors = self.rate(), []
        for name, gradient, momentum, ready in zip(self.weights, gradients, self.momentum, self.ready, strict=True):
            if self.engine.holds_weights:
                tensor = momentum.mul_(weight_devices.MOMENTUM).add_(gradient) * -rate
            else:
                tensor = gradient.contiguous()
            tensors.append(tensor)
            sleep_until(start + forward + ready * (self.run.compute_s - forward))
            self.engine.submit(name, tensor)
        sleep_until(start + self.run.compute_s)
        self.engine.wait()
        if not self.engine.holds_weights:
            for parameter, momentum, total in zip(self.weights.values(), self.momentum, tensors, strict=True):
                momentum.mul_(weight_devices.MOMENTUM).add_(total, alpha=1 / self.engine.size)
                parameter.data.sub_(momentum, alpha=rate)
        self.steps += 1

    def snapshot(self) -> dict[str, torch.Tensor]:
        now = self.engine.average() if self.engine.holds_weights else self.weights
        return {name: weight.detach().clone() for name, weight in now.items()}

    def accuracy(self, weights: dict[str, torch.Tensor]) -> float:
        judged = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter, weight in zip(reversed(list(judged.parameters())), weights.values(), strict=True):
                parameter.copy_(weight)
            found = judged(self.images.test_x).argmax(1)
        return float((found == self.images.test_y).float().mean())


def digest(weights: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights.values())).hexdigest()[:16]


def learn(engine: Engine, run: LearnSpec, images: Images, profile: list[Gradient]) -> None:
    rank.set_rate(run, engine.local_rank)
    trainer = Trainer(engine, run, images, profile)
    seconds: list[float] = []
    samples: list[int] = []
    accuracy: list[float] = []
    clock = 0.0
    last: dict[str, torch.Tensor] = {}
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
            accuracy += [trainer.accuracy(weights) for _, _, weights in taken]
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
                elements=sum(weight.numel() for weight in last.values()),
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
