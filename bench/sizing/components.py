"""Speeds of the components between storage and GPU in GB/s, and options that several plans share."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace

from bench.catalogue import gpu_rates, models
from bench.parse import number
from bench.predict import memory
from bench.predict.inputs import COLLECTIVES, ENGINES, INTERCONNECTS, LINK_HELP, LINKS, Setup, precision, single_step
from cluster.core.errors import UserError
from cluster.core.numbers import COUNT, POSITIVE


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
        return ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in asdict(self).items())


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


def add_compute_arguments(parser: argparse.ArgumentParser) -> None:
    """What determines the rate of one GPU."""
    models.add_arguments(parser, "resnet50")
    parser.add_argument("--gpu", help=f"device profile: {', '.join(gpu_rates.PROFILES)}")
    parser.add_argument("--precision", help="fp32, tf32, amp or fp16, where published (default: the GPU's usual one)")
    parser.add_argument("--single-rate", type=POSITIVE, help="measured images/s of one GPU, at the given --batch")


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    add_compute_arguments(parser)
    parser.add_argument("--seq-len", type=COUNT, help="words per sequence of a language model")
    parser.add_argument("--engine", choices=ENGINES, default="horovod", help="(default horovod)")
    parser.add_argument("--interconnect", choices=INTERCONNECTS, default="auto", help="link between a node's GPUs")
    parser.add_argument("--collective", choices=COLLECTIVES, default="nccl", help="(default nccl)")
    parser.add_argument("--link", choices=LINKS, default="native", help=LINK_HELP)
    parser.add_argument("--gpu-price", help="USD per GPU hour (default: `cluster prices`)")


def setup(
    args: argparse.Namespace, batch: int, gpus: int, per_node: int, rate: float | None, via: str, nics: int = 1
) -> Setup:
    """The configuration that `bench predict` would use for the same options. One that does not fit is refused."""
    found = any_size(args, batch, gpus, per_node, rate, via, nics)
    memory.check(found, getattr(args, "optimizer", None) or "sgd")
    return found


def any_size(
    args: argparse.Namespace, batch: int, gpus: int, per_node: int, rate: float | None, via: str, nics: int = 1
) -> Setup:
    """As `setup`, whatever memory it needs."""
    step, _, doubt = single_step(args.model, batch, args.gpu, args.precision, args.single_rate, args.seq_len)
    return Setup(
        args.model,
        batch,
        step,
        gpus,
        per_node,
        rate,
        via,
        args.engine,
        interconnect=args.interconnect,
        link=args.link,
        collective=args.collective,
        gpu=args.gpu,
        compute_doubt=doubt,
        seq_len=args.seq_len,
        precision=precision(args.precision, args.single_rate, args.gpu, args.model, args.seq_len),
        nics=nics,
        rate_unknown=rate is None,
    )
