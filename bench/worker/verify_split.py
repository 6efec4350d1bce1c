"""Verify networks that are split over ranks: gradients and weights must be those of one process with all samples.

    verify_split CASE...        such as fsdp, pipeline,gpipe, pipeline,stages=2, tensor,gpt2 or spatial,residual

Rank 0 prints, per case, the largest difference of any gradient of the first step, and of any weight after four.
"""

import json
import sys

import torch
from torch import nn

from bench.worker import accelerator, devices, engines, rank, split_devices, torch_transformers
from bench.worker.feed import Feed
from bench.worker.model_sizes import Size
from bench.worker.pipelined import PipelinedDevice
from bench.worker.protocol import SplitSpec
from bench.worker.sharded import whole
from bench.worker.verify import SingleProcess

STEPS = 4
BATCH = 4
CLASSES = 10
# A layer of the test network that is large enough to split.
LARGE_LINEAR = 400
# Neither height nor width nor channels divide by the number of ranks.
HEIGHT, WIDTH = 37, 29


def plain() -> nn.Sequential:
    """Without batch normalisation, whose statistics depend, correctly, on how a batch is split."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 7, 5, stride=2, padding=2), nn.ReLU(inplace=True)),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(7, 11, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(11, 5, 3, padding=1),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 26),
        nn.ReLU(inplace=True),
        # It hits nothing, but it must run on what comes out of a split layer.
        nn.Dropout(1e-9),
        nn.Linear(26, 22),
        nn.ReLU(inplace=True),
        nn.Linear(22, CLASSES),
    )


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.main(x) + x, inplace=True)


def residual() -> nn.Sequential:
    """With batch normalisation over all tiles, odd strides, pools of both kinds and a shortcut."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        Residual(6),
        nn.AvgPool2d(3, stride=1, padding=1),
        nn.Conv2d(6, 9, (3, 1), stride=2, padding=(1, 0)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(9, CLASSES),
    )


def transformer(kind: str, ranks: int) -> nn.Module:
    """Two blocks; the heads divide by the number of ranks, as tensor needs."""
    size = Size(64 * ranks, 2, 31, 13)
    return torch_transformers.GPT2(size) if kind == "gpt2" else torch_transformers.Bert(size)


def network(kind: str, ranks: int) -> nn.Module:
    torch.manual_seed(7)
    if kind in ("gpt2", "bert"):
        return transformer(kind, ranks)
    return residual() if kind == "residual" else plain()


def batch(kind: str, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    count = BATCH * ranks
    if kind in ("gpt2", "bert"):
        shape = (count, 11)
        return torch.randint(31, shape, generator=generator), torch.randint(31, shape, generator=generator)
    samples = torch.randn(count, 3, HEIGHT, WIDTH, generator=generator)
    return samples, torch.randint(CLASSES, (count,), generator=generator)


def by_name(device: devices.Device, engine: engines.Engine, gradients: bool) -> dict[str, torch.Tensor]:
    """Weights or gradients under their place among the unsplit network's parameters."""
    model = device.model  # type: ignore[attr-defined]
    # Copies: later steps change the originals.
    values = [whole((one.grad if gradients else one).detach()).clone() for one in model.parameters()]
    if not isinstance(device, PipelinedDevice):
        return {str(number): value for number, value in enumerate(values)}
    # The first pipeline's stages, one behind the other.
    stages = engine.gather((device.position, [value.tolist() for value in values]))
    found: dict[int, list[list[float]]] = {}
    for position, content in stages:
        found.setdefault(position, content)
    joined = [value for position in sorted(found) for value in found[position]]
    return {str(number): torch.tensor(value) for number, value in enumerate(joined)}


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    if ours.keys() != theirs.keys():
        raise RuntimeError(f"{len(ours)} parameters instead of {len(theirs)}")
    return max(float((value.reshape(theirs[name].shape) - theirs[name]).abs().max()) for name, value in ours.items())


def verify(engine: engines.SplitEngine, words: list[str]) -> dict[str, object]:
    method, *options = words
    kind = next((word for word in options if word in ("gpt2", "bert", "residual")), "plain")
    engine.method = method
    deep = next((int(word.partition("=")[2]) for word in options if word.startswith("stages=")), engine.size)
    # Of six units: three convolutions and three linear layers.
    stages = [at * 6 // deep for at in range(deep)]
    split = SplitSpec(stages, 2 * deep, "gpipe" if "gpipe" in options else "1f1b")
    samples, labels = batch(kind, engine.size)
    cpu = accelerator.Cpu()
    device = split_devices.build(
        network(kind, engine.size), samples, labels, split, engine, Feed(), cpu, large=LARGE_LINEAR
    )
    device.step(engine)
    gradients = by_name(device, engine, gradients=True)
    for _ in range(STEPS - 1):
        device.step(engine)
    device.check(engine)
    weights = by_name(device, engine, gradients=False)
    losses = [one for one in engine.gather(device.losses) if one]
    if engine.rank:
        return {}
    whole_network = network(kind, engine.size)
    single = devices.TrainingDevice(whole_network, samples, labels, "one", False, Feed(), cpu, cpu.arithmetic("fp32"))
    single.step(SingleProcess())
    first = by_name(single, engine, gradients=True)
    for _ in range(STEPS - 1):
        single.step(SingleProcess())
    return {
        "case": ",".join(words),
        "ranks": engine.size,
        "gradient_difference": difference(gradients, first),
        "weight_difference": difference(weights, by_name(single, engine, gradients=False)),
        "largest_gradient": max(float(value.abs().max()) for value in first.values()),
        "first_loss": losses[0][0],
        "last_loss": losses[0][-1],
    }


def main() -> None:
    torch.set_num_threads(1)
    engine = engines.SplitEngine("")
    for case in sys.argv[1:]:
        found = verify(engine, case.split(","))
        if engine.rank == 0:
            print("@bench " + json.dumps(found), flush=True)
    engine.barrier()
    rank.leave(engine)
