"""Input of a device: none (synthetic data stays on the device), images from shards, or images from DALI on a GPU."""

import time
from dataclasses import replace

import torch

from bench.worker import images, shards, torch_models
from bench.worker.engines import Engine
from bench.worker.loader import Loader
from bench.worker.protocol import InputReport, TrialSpec


class Feed:
    """Synthetic data: nothing to wait for."""

    def wait(self) -> None: ...

    def tensors(self, place: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None

    def start(self) -> None: ...

    def report(self) -> InputReport | None:
        return None

    def close(self) -> None: ...


class ShardFeed(Feed):
    """Images that the cores of the node decode while the device computes."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.start()

    def start(self) -> None:
        self.before, self.begin = replace(self.loader.meter), time.perf_counter()

    def wait(self) -> None:
        next(self.loader)

    def tensors(self, place: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        batch = next(self.loader)
        pixels, labels = torch.from_numpy(batch.pixels), torch.from_numpy(batch.labels)
        if place.type == "cpu":
            return pixels, labels
        # Send bytes and normalise on the device: floats would take three times the bandwidth of the bus.
        return normalised(pixels.to(place, non_blocking=True)), labels.to(place, non_blocking=True)

    def report(self) -> InputReport:
        return InputReport(
            cores=self.loader.cores,
            reused=self.loader.repeat,
            elapsed_s=time.perf_counter() - self.begin,
            **self.loader.meter.since(self.before),
            skipped=dict(self.loader.faults.counts),
            examples=self.loader.faults.examples,
        )

    def close(self) -> None:
        self.loader.close()


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """Convert height x width x RGBX bytes to normalised images, on the device that has the bytes."""
    mean = torch.tensor(images.MEAN, device=pixels.device)
    deviation = torch.tensor(images.DEVIATION, device=pixels.device)
    return ((pixels[..., :3].float() / 255 - mean) / deviation).permute(0, 3, 1, 2)


def make(trial: TrialSpec, engine: Engine) -> Feed:
    data = trial.input
    if data is None:
        return Feed()
    index = shards.load_index(data.location)
    if trial.device != "emulated" and index.classes > torch_models.CLASSES:
        raise shards.DataError(
            f"{index.location}: {index.classes} classes, the models tell {torch_models.CLASSES} apart"
        )
    if data.loader == "dali":
        from bench.worker.dali import DaliFeed

        return DaliFeed(index, trial, engine)
    loader = Loader(
        index,
        engine.rank,
        engine.size,
        trial.batch,
        cores=data.cores,
        policy=data.policy,
        strict=data.strict,
        pixels=trial.pixels,
        floats=trial.device == "cpu",
        repeat=data.reused,
    )
    return ShardFeed(loader)
