"""Speeds of the components between storage and GPU in GB/s, and options that several plans share."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace

from bench.catalogue import gpu_rates, models
from bench.parse import number
from bench.predict.inputs import ENGINES
from cluster.core import prices
from cluster.core.errors import UserError
from cluster.core.numbers import POSITIVE


@dataclass(frozen=True)
class Speeds:
    ssd: float = 0.4
    hdd_sequential: float = 0.2
    hdd_random: float = 0.02
    nic: float = 5.0
    core_in: float = 0.025
    core_out: float = 0.1
    gpu_in: float = 1.0
    gpu_compute: float = 0.3

    def as_text(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in asdict(self).items())


def add_argument(parser: argparse.ArgumentParser) -> None:
    text = f"override the speed of a component; can be repeated: {', '.join(asdict(Speeds()))}"
    parser.add_argument("--speed", action="append", default=[], metavar="NAME=GB/S", help=text)


def from_arguments(overrides: list[str]) -> Speeds:
    speeds = Speeds()
    known = asdict(speeds)
    for text in overrides:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            raise UserError(f"--speed: {name!r} is not known, use one of {', '.join(known)}")
        speeds = replace(speeds, **{name: number(value, f"--speed {name}")})
    return speeds


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="resnet50", help=f"{', '.join(models.NAMES)} (default resnet50)")
    parser.add_argument("--gpu", help=f"device profile: {', '.join(gpu_rates.PROFILES)}")
    parser.add_argument("--precision", help="fp32, tf32, amp or fp16, where published (default: the GPU's usual one)")
    parser.add_argument("--single-rate", type=POSITIVE, help="measured images/s of one GPU, at the given --batch")
    parser.add_argument("--engine", choices=ENGINES, default="horovod", help="(default horovod)")
    parser.add_argument("--gpu-price", help="USD per GPU hour (default: `cluster prices`)")


def gpu_price(given: str | None, gpu: str | None) -> float:
    """USD per GPU hour. Without --gpu it is the price of a V100."""
    return number(given, "--gpu-price") if given else prices.gpu_per_hour(gpu_rates.get(gpu or "v100").name)
