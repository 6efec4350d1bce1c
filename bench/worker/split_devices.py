"""The device of a rank of a split network: emulated, or trained on the CPU by torch's own methods."""

from typing import Any, cast

import torch
from torch import nn

from bench.worker import devices, pipelined, sharded, tensor_split, tiles, torch_models
from bench.worker.accelerator import Accelerator, computed_in
from bench.worker.devices import LEARNING_RATE, Device, TrainingDevice
from bench.worker.emulated_split import EmulatedSplit
from bench.worker.engines import Engine, SplitEngine
from bench.worker.feed import Feed
from bench.worker.protocol import SplitSpec, TrialSpec


class SplitTraining(TrainingDevice):
    """Trains a network whose gradients torch has partly summed already: `summed` are still to be added up."""

    summed: tuple[nn.Parameter, ...] = ()
    divisor = 1  # of all gradients, after the sums
    dist: Any = None

    def backward(self) -> None:
        super().backward()
        # fully_shard reports no gradient of its own: all are there, summed, when backward ends.
        self.timer.gradient()

    def sum(self) -> None:
        own = [parameter.grad for parameter in self.summed if parameter.grad is not None]
        for work in [self.dist.all_reduce(gradient, async_op=True) for gradient in own]:
            work.wait()
        if self.divisor > 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.divisor)

    def check(self, engine: Engine) -> None:
        """Fail unless all ranks have the same weights, or put the same ones together from their shares."""
        total = sum(float(sharded.whole(one.detach()).double().sum()) for one in self.model.parameters())
        sums = engine.gather(total)
        if max(sums) - min(sums) > 1e-6 * max(1.0, abs(sums[0])):
            raise RuntimeError(f"the weights differ between ranks: their sums are {sums}")


def make(trial: TrialSpec, engine: Engine, source: Feed, accelerator: Accelerator) -> Device:
    ranks, split = cast("SplitEngine", engine), trial.split or SplitSpec()
    if trial.device == "emulated":
        return EmulatedSplit(trial, split, ranks)
    model = torch_models.seeded(trial.model)
    model.load_state_dict(engine.broadcast(model.state_dict()))
    pieces = [devices.example(trial, rank) for rank in range(engine.size)]
    samples, labels = (torch.cat(part) for part in zip(*pieces, strict=True))
    return build(model, samples, labels, split, ranks, source, accelerator, trial.model)


def build(
    model: nn.Module,
    samples: torch.Tensor,
    labels: torch.Tensor,
    split: SplitSpec,
    engine: SplitEngine,
    source: Feed,
    accelerator: Accelerator,
    name: str = "",
    large: int = tensor_split.LARGE_LINEAR,
) -> Device:
    """samples and labels: of all ranks. A rank takes those that it needs."""
    if engine.method == "pipeline":
        return _pipeline(model, samples, labels, split, engine)
    each = len(samples) // engine.size
    mine = slice(engine.rank * each, (engine.rank + 1) * each)
    summed: list[nn.Parameter] = []
    divisor = 1
    if engine.method == "fsdp":
        model, samples, labels = sharded.shard(model), samples[mine], labels[mine]
    elif engine.method == "tensor":
        alike = tensor_split.is_transformer(model)
        tensor_split.split(model, mesh(engine), large)
        if not alike:
            samples, labels, divisor = samples[mine], labels[mine], engine.size
            summed = [one for one in model.parameters() if not tensor_split.own(one)]
    else:
        tiles.tile_up(model, tiles.Tiles(engine.dist, engine.rank, engine.size))
        same = set(map(id, tiles.behind(model)))
        summed = [one for one in model.parameters() if id(one) not in same]
    arithmetic = accelerator.arithmetic(computed_in("fp32", [accelerator.ampere]))
    device = SplitTraining(model, samples, labels, name, False, source, accelerator, arithmetic)
    device.summed, device.divisor, device.dist = tuple(summed), divisor, engine.dist
    return device


def mesh(engine: SplitEngine) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if engine.mesh is None:
        engine.mesh = init_device_mesh("cpu", (engine.size,))
    return engine.mesh


def _pipeline(
    model: nn.Module, samples: torch.Tensor, labels: torch.Tensor, split: SplitSpec, engine: SplitEngine
) -> Device:
    deep = len(split.stages)
    each = len(samples) // (engine.size // deep)
    pipe = engine.rank // deep
    mine = slice(pipe * each, (pipe + 1) * each)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)

    parts = pipelined.sequence(model)
    return pipelined.PipelinedDevice(parts, split, samples[mine], labels[mine], engine, optimizer)
