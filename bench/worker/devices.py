"""The device of a step: an emulated accelerator that sleeps, or a real one that trains."""

import gc
import time
import weakref
from typing import Protocol

import torch
from torch import nn

from bench.worker import torch_models, torch_transformers
from bench.worker.accelerator import Accelerator, Arithmetic, computed_in
from bench.worker.engines import Engine, GradientSum, ModuleEngine, SplitEngine
from bench.worker.feed import Feed
from bench.worker.model_sizes import TRANSFORMERS
from bench.worker.node_link import sleep_until
from bench.worker.protocol import Gradient, Step, TrialSpec
from bench.worker.step_timer import StepTimer

FORWARD_SHARE = 1 / 3
LEARNING_RATE = 0.01


class Device(Protocol):
    losses: list[float]
    precision: str | None

    def step(self, engine: GradientSum) -> Step: ...
    def check(self, engine: Engine) -> None: ...


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a contiguous tensor, which Horovod requires: gradients can be in channels_last format."""
    return tensor if tensor.is_contiguous() else tensor.permute(0, 2, 3, 1)


class EmulatedDevice:
    """Sleeps for the compute time and submits each gradient, scaled down, when a real device would have it."""

    precision: str | None = None
    sends_at_end = False

    def __init__(self, trial: TrialSpec, gradients: list[Gradient], source: Feed) -> None:
        self.source = source
        self.slowdown = trial.slowdown
        compute = (trial.compute_ms or 0.0) / 1000 * self.slowdown
        self.forward = compute * FORWARD_SHARE
        self.backward = compute - self.forward
        self.scale = trial.scale
        dtype = torch.float16 if trial.compression == "fp16" else torch.float32
        # All trials of a launch use the same names: Horovod keeps every name, and each one slows negotiation.
        self.gradients = [
            (f"{trial.model}.{i}", torch.ones(max(1, round(g.elements / self.scale)), dtype=dtype), g.ready)
            for i, g in enumerate(gradients)
        ]
        self.losses: list[float] = []

    def step(self, engine: GradientSum) -> Step:
        begin = time.perf_counter()
        self.source.wait()
        engine.begin(self.scale)
        start = time.perf_counter()
        sleep_until(start + self.forward)
        first = time.perf_counter()
        for name, tensor, ready in self.gradients:
            sleep_until(start + self.forward + ready * self.backward)
            engine.submit(name, tensor.fill_(1.0))
        sleep_until(start + self.forward + self.backward)
        computed = time.perf_counter()
        if self.sends_at_end:
            first = computed
        engine.wait()
        end = time.perf_counter()
        times = (end - begin, computed - start, end - first, start - begin)
        return Step(*(seconds / self.slowdown for seconds in times))

    def check(self, engine: Engine) -> None:
        for name, tensor, _ in self.gradients:
            if float(tensor[0]) != engine.size:
                raise RuntimeError(f"{name}: the sum over {engine.size} ranks is {float(tensor[0])}")


class TrainingDevice:
    """Trains the model and submits each gradient, in fp16 if half is set, as soon as backward yields it."""

    def __init__(
        self,
        model: nn.Module,
        images: torch.Tensor,
        labels: torch.Tensor,
        name: str,
        half: bool,
        source: Feed,
        accelerator: Accelerator,
        arithmetic: Arithmetic,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.model, self.images, self.labels, self.name, self.half = model, images, labels, name, half
        self.source, self.arithmetic, self.layout = source, arithmetic, layout
        self.precision: str | None = arithmetic.precision
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.engine: GradientSum | None = None
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.timer = StepTimer(accelerator)
        self.loss: torch.Tensor | None = None
        self.losses: list[float] = []
        # The hooks must not keep this device: Python does not find cycles through them, and no trial would be freed.
        me = weakref.proxy(self)
        for i, parameter in enumerate(model.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda p, i=i: me.submit(i, p))

    def submit(self, number: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None and self.engine is not None  # noqa: S101
        if not self.engine.in_backward:
            tensor = gradient.half() if self.half else gradient
            self.sent.append((gradient, tensor))
            self.engine.submit(f"{self.name}.{number}", dense(tensor))
        self.timer.gradient()

    def fetch(self) -> bool:
        batch = self.source.tensors(self.images.device)
        if batch is not None:
            self.images, self.labels = batch[0].contiguous(memory_format=self.layout), batch[1]
        return batch is not None

    def backward(self) -> None:
        assert self.engine is not None  # noqa: S101
        self.engine.begin(1.0)
        self.optimizer.zero_grad(set_to_none=False)
        with self.arithmetic.run():
            self.loss = torch_transformers.loss(self.model(self.images), self.labels)
        self.arithmetic.scaler.scale(self.loss).backward()

    def sum(self) -> None:
        assert self.engine is not None  # noqa: S101
        self.engine.wait()

    def update(self) -> None:
        assert self.engine is not None  # noqa: S101
        if self.sent:
            gradients, sums = map(list, zip(*self.sent, strict=True))
            if self.half:
                torch._foreach_copy_(gradients, sums)
            # All at once: on a GPU the launches of 160 divisions would take longer than the divisions.
            torch._foreach_div_(gradients, self.engine.size)
        # An overflow is in the sums, so that all ranks leave out the same steps.
        self.arithmetic.scaler.step(self.optimizer)
        self.arithmetic.scaler.update()

    def step(self, engine: GradientSum) -> Step:
        self.engine, self.sent = engine, []
        step = self.timer.step(self)
        assert self.loss is not None  # noqa: S101
        self.losses.append(float(self.loss.detach()))
        return step

    def check(self, engine: Engine) -> None:
        """Fail unless all ranks have the same weights."""
        total = float(sum(parameter.detach().double().sum() for parameter in self.model.parameters()))
        sums = engine.gather(total)
        if max(sums) - min(sums) > 1e-6 * max(1.0, abs(sums[0])):
            raise RuntimeError(f"the weights differ between ranks: their sums are {sums}")


def example(trial: TrialSpec, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Synthetic samples of a rank, and their labels."""
    generator = torch.Generator().manual_seed(100 + rank)
    if trial.tokens:
        shape, words = (trial.batch, trial.tokens), TRANSFORMERS[trial.model].vocabulary
        return torch.randint(words, shape, generator=generator), torch.randint(words, shape, generator=generator)
    images = torch.randn(trial.batch, 3, trial.pixels, trial.pixels, generator=generator)
    return images, torch.randint(torch_models.CLASSES, (trial.batch,), generator=generator)


def make(trial: TrialSpec, gradients: list[Gradient], engine: Engine, source: Feed, accelerator: Accelerator) -> Device:
    if isinstance(engine, SplitEngine):
        from bench.worker import split_devices

        return split_devices.make(trial, engine, source, accelerator)
    if trial.device == "emulated":
        if engine.holds_weights:
            from bench.worker.weight_devices import EmulatedWeights

            return EmulatedWeights(trial, gradients, source, engine)
        return EmulatedDevice(trial, gradients, source)
    # DistributedDataParallel is in cycles. The memory of the trial before must be free before this one needs it.
    gc.collect()
    target = torch.device(accelerator.place)
    arithmetic = accelerator.arithmetic(computed_in(trial.precision, engine.gather(accelerator.ampere)))
    layout = torch.channels_last if trial.channels_last else torch.contiguous_format
    if trial.tokens:
        layout = torch.contiguous_format
    model, images, labels = torch_models.seeded(trial.model), *example(trial, engine.rank)
    images, labels = images.to(target, memory_format=layout), labels.to(target)
    # All ranks start with the weights of rank 0, sent from CPU memory: tensors of its GPU would arrive on that GPU.
    model.load_state_dict(engine.broadcast(model.state_dict()))
    model, half = model.to(target, memory_format=layout), trial.compression == "fp16"
    if isinstance(engine, ModuleEngine):
        model = engine.module(model, half)
    if engine.holds_weights:
        from bench.worker.weight_devices import TrainedWeights

        return TrainedWeights(model, images, labels, trial, source, accelerator, arithmetic, engine)
    return TrainingDevice(model, images, labels, trial.model, half, source, accelerator, arithmetic, layout)
