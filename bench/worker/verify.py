"""Verify data-parallel training: N ranks with batch b must end with the weights of one rank with batch N x b.

Rank 0 prints the largest difference, over all weights, from a single process that trained on the whole batch.
"""

import json
import sys

import torch
from torch import nn

from bench.worker import accelerator, compression, devices, engines, rank
from bench.worker.feed import Feed

STEPS = 8
BATCH = 4
CLASSES = 10


class SingleProcess:
    """The engine of a single process: its own gradients are the sum."""

    rank, size, local_rank, in_backward, holds_weights = 0, 1, 0, False, False

    def begin(self, scale: float) -> None: ...
    def submit(self, name: str, tensor: torch.Tensor) -> None: ...
    def wait(self) -> None: ...


def network() -> nn.Sequential:
    """Without batch normalisation: its statistics depend, correctly, on how a batch is split."""
    torch.manual_seed(7)
    convolutions = (nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.LazyLinear(CLASSES))


def train(
    engine: engines.GradientSum, images: torch.Tensor, labels: torch.Tensor, channels_last: bool = False
) -> devices.TrainingDevice:
    model = network()
    model(images[:1])
    torch.manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    if channels_last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    # Like a trial: DistributedDataParallel shapes its buckets by the layout of the weights that it is given.
    if isinstance(engine, engines.ModuleEngine):
        model = engine.module(model, half=False)
    cpu = accelerator.Cpu()
    device = devices.TrainingDevice(model, images, labels, "verify", False, Feed(), cpu, cpu.arithmetic("fp32"))
    for _ in range(STEPS):
        device.step(engine)
    return device


def main() -> None:
    torch.set_num_threads(1)
    # GPUs have DistributedDataParallel itself; here it trains over Gloo.
    made = engines.ModuleEngine() if sys.argv[1] == "ddp-module" else engines.make(sys.argv[1])
    engine = compression.wrap(made, sys.argv[2] if len(sys.argv) > 2 else "none")
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(BATCH * engine.size, 3, 16, 16, generator=generator)
    labels = torch.randint(CLASSES, (BATCH * engine.size,), generator=generator)
    mine = slice(engine.rank * BATCH, (engine.rank + 1) * BATCH)
    device = train(engine, images[mine], labels[mine], channels_last="channels_last" in sys.argv)
    weights = [parameter.detach().tolist() for parameter in device.model.parameters()]
    all_weights = engine.gather(weights)
    if engine.rank == 0:
        single = train(SingleProcess(), images, labels)
        difference = max(
            float((torch.tensor(ours) - theirs.detach()).abs().max())
            for ours, theirs in zip(weights, single.model.parameters(), strict=True)
        )
        result = {
            "ranks": engine.size,
            "identical": all(other == weights for other in all_weights),
            "largest_difference": difference,
            "first_loss": device.losses[0],
            "last_loss": device.losses[-1],
        }
        print("@bench " + json.dumps(result), flush=True)
    engine.barrier()
    rank.leave(engine)
