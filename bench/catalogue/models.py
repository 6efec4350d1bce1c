"""The networks we train and predict, layer by layer: parameter shapes and multiply-accumulates, without torch.

Gradient sizes and the order in which gradients become ready determine how much communication overlaps with compute. The
emulated device, the predictor and the check of the torch models all use these tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from bench.catalogue import mobile, own_models, transformers
from bench.catalogue.layers import Builder, Layer, Shape
from bench.worker.model_sizes import TRANSFORMERS, VIT_B16, VIT_PATCH
from cluster.core.errors import UserError


@dataclass(frozen=True)
class Model:
    """A network; `layers` are in forward order. It reads images of `input_pixels` or sequences of `tokens`."""

    name: str
    input_pixels: int
    layers: tuple[Layer, ...]
    tokens: int = 0
    # Whether the time of a step follows the multiply-accumulates, as between common CNNs. Depthwise convolutions and
    # transformers have another ratio, so a rate of ResNet-50 says nothing about them.
    follows_macs: bool = True
    # Values that training keeps of one image or sequence, where they were counted.
    kept: int | None = None

    @property
    def unit(self) -> str:
        return "sequences" if self.tokens else "images"

    @property
    def parameters(self) -> int:
        return sum(sum(layer.parameters) for layer in self.layers)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients in single precision."""
        return 4 * self.parameters

    @property
    def gradient_tensors(self) -> int:
        return sum(len(layer.shapes) for layer in self.layers)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image's forward pass."""
        return sum(layer.macs for layer in self.layers)

    def gradients_in_backward_order(self) -> list[tuple[int, float]]:
        """(elements, share of the backward pass that has run when this gradient is ready), in the order of readiness.

        A layer takes its share of the multiply-accumulates; the last gradient is ready at 1.0.
        """
        total, done = self.macs, 0
        ready: list[tuple[int, float]] = []
        for layer in reversed(self.layers):
            done += layer.macs
            ready += [(elements, done / total) for elements in reversed(layer.parameters)]
        return ready


def _resnet(*blocks_per_stage: int) -> tuple[Layer, ...]:
    net = Builder(224)
    net.conv("conv1", 64, 7, stride=2)
    net.norm("bn1")
    net.pool(3, 2, 1)
    for stage, blocks in enumerate(blocks_per_stage):
        width = 64 << stage
        for block in range(blocks):
            prefix = f"layer{stage + 1}.{block}"
            stride = 2 if stage and not block else 1
            before = net.size
            net.conv(f"{prefix}.conv1", width, 1)
            net.norm(f"{prefix}.bn1")
            net.conv(f"{prefix}.conv2", width, 3, stride=stride)
            net.norm(f"{prefix}.bn2")
            net.conv(f"{prefix}.conv3", 4 * width, 1)
            net.norm(f"{prefix}.bn3")
            if not block:
                net.size = before
                net.conv(f"{prefix}.downsample.0", 4 * width, 1, stride=stride)
                net.norm(f"{prefix}.downsample.1")
    net.linear("fc", 2048, 1000)
    return tuple(net.layers)


def _vgg16() -> tuple[Layer, ...]:
    net, index = Builder(224), 0
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            net.conv(f"features.{index}", width, 3, bias=True)
            index += 2
        net.pool(2, 2)
        index += 1
    net.linear("classifier.0", 512 * 7 * 7, 4096)
    net.linear("classifier.3", 4096, 4096)
    net.linear("classifier.6", 4096, 1000)
    return tuple(net.layers)


def _alexnet() -> tuple[Layer, ...]:
    net = Builder(224)
    net.conv("features.0", 64, 11, stride=4, pad=2, bias=True)
    net.pool(3, 2)
    net.conv("features.3", 192, 5, bias=True)
    net.pool(3, 2)
    net.conv("features.6", 384, 3, bias=True)
    net.conv("features.8", 256, 3, bias=True)
    net.conv("features.10", 256, 3, bias=True)
    net.linear("classifier.1", 256 * 6 * 6, 4096)
    net.linear("classifier.4", 4096, 4096)
    net.linear("classifier.6", 4096, 1000)
    return tuple(net.layers)


# The convolutions of an Inception branch, each with its channels and kernel.
_Branch = list[tuple[int, int | Shape]]
_ROW, _COLUMN = (1, 7), (7, 1)
# Stands for the kernel of two convolutions side by side, 1x3 and 3x1, on the same input.
_FORK = -1


def _inceptionv3() -> tuple[Layer, ...]:
    """Without the auxiliary classifier, as the published parameter count has it."""
    net = Builder(299)

    def unit(name: str, out: int, kernel: int | Shape, stride: int = 1, pad: int | None = None) -> None:
        net.conv(f"{name}.conv", out, kernel, stride, pad)
        net.norm(f"{name}.bn")

    def block(prefix: str, branches: dict[str, _Branch], halve: bool = False) -> None:
        """Branches in registration order, joined by channel.

        A block that halves height and width does so in the last convolution of each branch, and has a pooling branch
        that passes all channels.
        """
        before = net.size
        channels = before[0] if halve else 0
        for branch, units in branches.items():
            net.size = before
            for number, (out, kernel) in enumerate(units, start=1):
                name = f"{prefix}.{branch}_{number}" if len(units) > 1 else f"{prefix}.{branch}"
                if kernel == _FORK:
                    inputs = net.size
                    unit(f"{name}a", out, (1, 3))
                    net.size = inputs
                    unit(f"{name}b", out, (3, 1))
                    channels += out
                elif halve and number == len(units):
                    unit(name, out, kernel, stride=2, pad=0)
                else:
                    unit(name, out, kernel)
            channels += net.size[0]
        net.size = (channels, *net.size[1:])

    unit("Conv2d_1a_3x3", 32, 3, stride=2, pad=0)
    unit("Conv2d_2a_3x3", 32, 3, pad=0)
    unit("Conv2d_2b_3x3", 64, 3)
    net.pool(3, 2)
    unit("Conv2d_3b_1x1", 80, 1)
    unit("Conv2d_4a_3x3", 192, 3, pad=0)
    net.pool(3, 2)
    double: _Branch = [(64, 1), (96, 3), (96, 3)]
    for name, pooled in (("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)):
        five: _Branch = [(48, 1), (64, 5)]
        block(name, {"branch1x1": [(64, 1)], "branch5x5": five, "branch3x3dbl": double, "branch_pool": [(pooled, 1)]})
    block("Mixed_6a", {"branch3x3": [(384, 3)], "branch3x3dbl": double}, halve=True)
    for name, c7 in (("Mixed_6b", 128), ("Mixed_6c", 160), ("Mixed_6d", 160), ("Mixed_6e", 192)):
        seven: _Branch = [(c7, 1), (c7, _ROW), (192, _COLUMN)]
        twice: _Branch = [(c7, 1), (c7, _COLUMN), (c7, _ROW), (c7, _COLUMN), (192, _ROW)]
        block(name, {"branch1x1": [(192, 1)], "branch7x7": seven, "branch7x7dbl": twice, "branch_pool": [(192, 1)]})
    last: _Branch = [(192, 1), (192, _ROW), (192, _COLUMN), (192, 3)]
    block("Mixed_7a", {"branch3x3": [(192, 1), (320, 3)], "branch7x7x3": last}, halve=True)
    for name in ("Mixed_7b", "Mixed_7c"):
        three: _Branch = [(384, 1), (384, _FORK)]
        dbl: _Branch = [(448, 1), (384, 3), (384, _FORK)]
        block(name, {"branch1x1": [(320, 1)], "branch3x3": three, "branch3x3dbl": dbl, "branch_pool": [(192, 1)]})
    net.linear("fc", 2048, 1000)
    return tuple(net.layers)


_CNNS: dict[str, tuple[int, Callable[[], tuple[Layer, ...]]]] = {
    "resnet50": (224, lambda: _resnet(3, 4, 6, 3)),
    "resnet101": (224, lambda: _resnet(3, 4, 23, 3)),
    "resnet152": (224, lambda: _resnet(3, 8, 36, 3)),
    "inceptionv3": (299, _inceptionv3),
    "vgg16": (224, _vgg16),
    "alexnet": (224, _alexnet),
}
# Their step time on a GPU must be measured or published for themselves.
_OTHERS: dict[str, tuple[int, Callable[[], tuple[Layer, ...]]]] = {
    "mobilenetv2": (224, mobile.mobilenetv2),
    "efficientnet-b0": (224, lambda: mobile.efficientnet("efficientnet-b0")),
    "efficientnet-b4": (380, lambda: mobile.efficientnet("efficientnet-b4")),
    "vit-b16": (224, lambda: transformers.vit(VIT_B16, VIT_PATCH)),
}
# Default length of a sequence: that of the published benchmarks.
SEQUENCE = {"bert-base": 128, "bert-large": 128, "gpt2": 1024, "gpt2-medium": 1024, "gpt2-498m": 1024}
NAMES = (*_CNNS, *_OTHERS, *SEQUENCE)


@cache
def get(name: str, seq_len: int | None = None) -> Model:
    if name in SEQUENCE:
        size, tokens = TRANSFORMERS[name], seq_len or SEQUENCE[name]
        if tokens > size.positions:
            raise UserError(f"--seq-len: {tokens} is too long, {name} knows {size.positions} positions")
        build = transformers.bert if name.startswith("bert") else transformers.gpt2
        return Model(name, 0, build(size, tokens), tokens, follows_macs=False)
    if is_file(name):
        return _own(name, seq_len)
    if name not in NAMES:
        raise UserError(f"model: {name!r} is not known, use one of {', '.join(NAMES)}, or a --model-file of your own")
    if seq_len is not None:
        raise UserError(f"--seq-len: {name} reads images; only {', '.join(SEQUENCE)} have a sequence length")
    if name in _OTHERS:
        pixels, make = _OTHERS[name]
        return Model(name, pixels, make(), follows_macs=False)
    pixels, make = _CNNS[name]
    return Model(name, pixels, make())


def _own(name: str, seq_len: int | None) -> Model:
    kind, shape, layers, kept = own_models.read(name)
    tokens = shape[-1] if kind == "sequences" else 0
    if seq_len not in (None, tokens or None):
        raise UserError(f"--seq-len: {name} was written for inputs of {'x'.join(map(str, shape))}; write another file")
    return Model(name, 0 if tokens else shape[-1], layers, tokens, follows_macs=False, kept=kept)


def is_file(name: str) -> bool:
    """Whether a model's name is that of a --model-file."""
    return name.endswith(own_models.SUFFIX)


def add_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """--model and --model-file; both give the name that `get` takes."""

    def file(text: str) -> str:
        if not is_file(text):
            raise argparse.ArgumentTypeError(f"{text!r} must end in {own_models.SUFFIX}")
        return text

    either = parser.add_mutually_exclusive_group()
    either.add_argument("--model", default=default, help=f"{', '.join(NAMES)} (default resnet50)")
    text = "a model of your own, in the table that `bench predict --torch` writes"
    either.add_argument("--model-file", dest="model", type=file, default=argparse.SUPPRESS, metavar="CSV", help=text)
