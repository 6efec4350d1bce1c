"""A stage of a network, driven by torch's own schedules: GPipe and 1F1B. Replicas of a pipeline average gradients."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.worker import torch_transformers
from bench.worker.emulated_split import group_of
from bench.worker.engines import Engine, GradientSum, SplitEngine
from bench.worker.protocol import SplitSpec, Step


def sequence(model: nn.Module) -> list[nn.Module]:
    """The units of bench/catalogue/units.py: each has parameters, and what follows without any belongs to it."""
    if isinstance(model, torch_transformers.ViT):
        return [Patches(model), *model.blocks, Head(model)]
    found: list[list[nn.Module]] = []
    for part in model.children():
        if any(True for _ in part.parameters()) or not found:
            found.append([])
        found[-1].append(part)
    return [nn.Sequential(*parts) for parts in found]


class Patches(nn.Module):
    """The first unit of a ViT: patches of the image, the class token and positions."""

    def __init__(self, model: torch_transformers.ViT) -> None:
        super().__init__()
        self.patches, self.class_token, self.positions = model.patches, model.class_token, model.positions

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions


class Head(nn.Module):
    """The last unit of a ViT."""

    def __init__(self, model: torch_transformers.ViT) -> None:
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(x)[:, 0])
        return y


class PipelinedDevice:
    """Rank r is stage r % stages of pipeline r // stages. The samples are those of this pipeline."""

    precision: str | None = "fp32"

    def __init__(
        self,
        units: Sequence[nn.Module],
        split: SplitSpec,
        samples: torch.Tensor,
        labels: torch.Tensor,
        engine: SplitEngine,
        optimizer: Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        deep = len(split.stages)
        self.position, first = engine.rank % deep, engine.rank - engine.rank % deep
        self.last, self.samples, self.labels = self.position == deep - 1, samples, labels
        ends = [*split.stages, len(units)]
        self.model = nn.Sequential(*units[ends[self.position] : ends[self.position + 1]])
        # Every rank creates the groups of all pipelines and of all stages.
        pipes = {at: group_of(engine, list(range(at, at + deep))) for at in range(0, engine.size, deep)}
        stages = [group_of(engine, list(range(at, engine.size, deep))) for at in range(deep)]
        self.replicas, self.beside = engine.size // deep, stages[self.position]
        stage = PipelineStage(self.model, self.position, deep, torch.device("cpu"), group=pipes[first])
        self.computed = 0.0
        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(stage, name, partial(self._timed, getattr(stage, name)))
        kind = ScheduleGPipe if split.schedule == "gpipe" else Schedule1F1B
        self.schedule = kind(stage, split.micro_batches, torch_transformers.loss)
        self.optimizer = optimizer(self.model.parameters())
        self.dist, self.losses = engine.dist, list[float]()

    def _timed(self, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = work(*args, **options)
        self.computed += time.perf_counter() - begin
        return result

    def gradients(self) -> None:
        """Forward and backward of all micro-batches, and the mean over the replicas of this stage."""
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = (self.samples,) if self.position == 0 else ()
        self.schedule.step(*given, **({"target": self.labels, "losses": losses} if self.last else {}))
        if losses:
            self.losses.append(float(torch.stack(losses).detach().mean()))
        if self.replicas > 1:
            own = [p.grad for p in self.model.parameters() if p.grad is not None]
            for work in [self.dist.all_reduce(one, group=self.beside, async_op=True) for one in own]:
                work.wait()
            for one in own:
                one.div_(self.replicas)

    def step(self, engine: GradientSum) -> Step:
        begin, self.computed = time.perf_counter(), 0.0
        self.gradients()
        waited = time.perf_counter() - begin - self.computed
        update = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        return Step(end - begin, self.computed + end - update, waited, 0.0)

    def check(self, engine: Engine) -> None:
        """Fail unless the replicas of each stage have the same weights."""
        total = float(sum(parameter.detach().double().sum() for parameter in self.model.parameters()))
        sums = [one for at, one in engine.gather((self.position, total)) if at == self.position]
        if max(sums) - min(sums) > 1e-6 * max(1.0, abs(sums[0])):
            raise RuntimeError(
                f"the weights of stage {self.position + 1} differ between replicas: their sums are {sums}"
            )
