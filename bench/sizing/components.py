"""Speeds of the parts that data passes on its way to a GPU, GB/s, which every plan shows and lets you override."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, fields, replace

from cluster.core.errors import UserError


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
    parser.add_argument(
        "--speed",
        action="append",
        default=[],
        metavar="NAME=GB/S",
        help="override a component's speed, may be repeated: " + ", ".join(field.name for field in fields(Speeds)),
    )


def from_arguments(overrides: list[str]) -> Speeds:
    speeds = Speeds()
    known = [field.name for field in fields(Speeds)]
    for text in overrides:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            raise UserError(f"--speed: {name!r} is not known, use one of {', '.join(known)}")
        speeds = replace(speeds, **{name: positive(value, f"--speed {name}")})
    return speeds


def positive(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{flag}: {text!r} is not a number") from None
    if not math.isfinite(value) or value <= 0:
        raise UserError(f"{flag}: {text} must be a number above 0")
    return value
