"""The networks we train and predict, layer by layer: parameter shapes and multiply-accumulates, without torch.

Gradient sizes and the order in which gradients become ready determine how much communication overlaps with compute. The
emulated device, the predictor and the check of the torch models all use these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

from cluster.core.errors import UserError

Shape = tuple[int, ...]
BYTES_PER_PARAMETER = 4


@dataclass(frozen=True)
class Layer:
    """One layer that has parameters. `shapes` are in the order in which the framework registers them."""

    name: str
    shapes: tuple[Shape, ...]
    macs: int

    @property
    def parameters(self) -> tuple[int, ...]:
        """Number of elements of each parameter tensor, and so of each gradient."""
        return tuple(prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Model:
    """A network; `layers` are in forward order."""

    name: str
    input_pixels: int
    layers: tuple[Layer, ...]

    @property
    def parameters(self) -> int:
        return sum(sum(layer.parameters) for layer in self.layers)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients in single precision."""
        return BYTES_PER_PARAMETER * self.parameters

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
        return list(self._backward)

    @cached_property
    def _backward(self) -> tuple[tuple[int, float], ...]:
        total, done = self.macs, 0
        ready: list[tuple[int, float]] = []
        for layer in reversed(self.layers):
            done += layer.macs
            ready += [(elements, done / total) for elements in reversed(layer.parameters)]
        return tuple(ready)


class _Builder:
    """Appends layers and tracks the channels, height and width of the activations."""

    def __init__(self, pixels: int) -> None:
        self.channels, self.height, self.width = 3, pixels, pixels
        self.layers: list[Layer] = []

    def conv(
        self, name: str, out: int, kernel: int | Shape, stride: int = 1, pad: int | Shape = 0, bias: bool = False
    ) -> None:
        kh, kw = (kernel, kernel) if isinstance(kernel, int) else kernel
        ph, pw = (pad, pad) if isinstance(pad, int) else pad
        self.height = (self.height + 2 * ph - kh) // stride + 1
        self.width = (self.width + 2 * pw - kw) // stride + 1
        weight: Shape = (out, self.channels, kh, kw)
        shapes: tuple[Shape, ...] = (weight, (out,)) if bias else (weight,)
        self.layers.append(Layer(name, shapes, prod(weight) * self.height * self.width))
        self.channels = out

    def norm(self, name: str) -> None:
        self.layers.append(Layer(name, ((self.channels,), (self.channels,)), 0))

    def linear(self, name: str, inputs: int, out: int) -> None:
        self.layers.append(Layer(name, ((out, inputs), (out,)), inputs * out))

    def pool(self, kernel: int, stride: int, pad: int = 0) -> None:
        self.height = (self.height + 2 * pad - kernel) // stride + 1
        self.width = (self.width + 2 * pad - kernel) // stride + 1

    @property
    def size(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    @size.setter
    def size(self, value: tuple[int, int, int]) -> None:
        self.channels, self.height, self.width = value


def _resnet(*blocks_per_stage: int) -> tuple[Layer, ...]:
    net = _Builder(224)
    net.conv("conv1", 64, 7, stride=2, pad=3)
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
            net.conv(f"{prefix}.conv2", width, 3, stride=stride, pad=1)
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
    net, index = _Builder(224), 0
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            net.conv(f"features.{index}", width, 3, pad=1, bias=True)
            index += 2
        net.pool(2, 2)
        index += 1
    net.linear("classifier.0", 512 * 7 * 7, 4096)
    net.linear("classifier.3", 4096, 4096)
    net.linear("classifier.6", 4096, 1000)
    return tuple(net.layers)


def _alexnet() -> tuple[Layer, ...]:
    net = _Builder(224)
    net.conv("features.0", 64, 11, stride=4, pad=2, bias=True)
    net.pool(3, 2)
    net.conv("features.3", 192, 5, pad=2, bias=True)
    net.pool(3, 2)
    net.conv("features.6", 384, 3, pad=1, bias=True)
    net.conv("features.8", 256, 3, pad=1, bias=True)
    net.conv("features.10", 256, 3, pad=1, bias=True)
    net.linear("classifier.1", 256 * 6 * 6, 4096)
    net.linear("classifier.4", 4096, 4096)
    net.linear("classifier.6", 4096, 1000)
    return tuple(net.layers)


# One convolution of an Inception branch: name, channels, kernel, stride, padding.
_Unit = tuple[str, int, int | Shape, int, int | Shape]
# Stands for the kernel of a unit that is two side by side, 1x3 and 3x1, on the same input.
_FORK = -1


def _inceptionv3() -> tuple[Layer, ...]:
    """Without the auxiliary classifier, as the published parameter count has it."""
    net = _Builder(299)

    def unit(prefix: str, spec: _Unit) -> None:
        name, out, kernel, stride, pad = spec
        dotted = f"{prefix}.{name}" if prefix else name
        net.conv(f"{dotted}.conv", out, kernel, stride, pad)
        net.norm(f"{dotted}.bn")

    def block(prefix: str, branches: list[list[_Unit]], pooled: int = 0) -> None:
        """Branches in registration order, joined by channel; `pooled` channels pass a pooling branch unchanged."""
        before, channels = net.size, pooled
        for branch in branches:
            net.size = before
            for name, out, kernel, stride, pad in branch:
                if kernel == _FORK:
                    inputs = net.channels
                    unit(prefix, (f"{name}a", out, (1, 3), 1, (0, 1)))
                    net.channels = inputs
                    unit(prefix, (f"{name}b", out, (3, 1), 1, (1, 0)))
                    net.channels = 2 * out
                else:
                    unit(prefix, (name, out, kernel, stride, pad))
            channels += net.channels
        net.channels = channels

    unit("", ("Conv2d_1a_3x3", 32, 3, 2, 0))
    unit("", ("Conv2d_2a_3x3", 32, 3, 1, 0))
    unit("", ("Conv2d_2b_3x3", 64, 3, 1, 1))
    net.pool(3, 2)
    unit("", ("Conv2d_3b_1x1", 80, 1, 1, 0))
    unit("", ("Conv2d_4a_3x3", 192, 3, 1, 0))
    net.pool(3, 2)
    for name, pool_features in (("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)):
        block(
            name,
            [
                [("branch1x1", 64, 1, 1, 0)],
                [("branch5x5_1", 48, 1, 1, 0), ("branch5x5_2", 64, 5, 1, 2)],
                [("branch3x3dbl_1", 64, 1, 1, 0), ("branch3x3dbl_2", 96, 3, 1, 1), ("branch3x3dbl_3", 96, 3, 1, 1)],
                [("branch_pool", pool_features, 1, 1, 0)],
            ],
        )
    block(
        "Mixed_6a",
        [
            [("branch3x3", 384, 3, 2, 0)],
            [("branch3x3dbl_1", 64, 1, 1, 0), ("branch3x3dbl_2", 96, 3, 1, 1), ("branch3x3dbl_3", 96, 3, 2, 0)],
        ],
        pooled=288,
    )
    row: tuple[int | Shape, int | Shape] = ((1, 7), (0, 3))
    column: tuple[int | Shape, int | Shape] = ((7, 1), (3, 0))
    for name, c7 in (("Mixed_6b", 128), ("Mixed_6c", 160), ("Mixed_6d", 160), ("Mixed_6e", 192)):
        block(
            name,
            [
                [("branch1x1", 192, 1, 1, 0)],
                [
                    ("branch7x7_1", c7, 1, 1, 0),
                    ("branch7x7_2", c7, row[0], 1, row[1]),
                    ("branch7x7_3", 192, column[0], 1, column[1]),
                ],
                [
                    ("branch7x7dbl_1", c7, 1, 1, 0),
                    ("branch7x7dbl_2", c7, column[0], 1, column[1]),
                    ("branch7x7dbl_3", c7, row[0], 1, row[1]),
                    ("branch7x7dbl_4", c7, column[0], 1, column[1]),
                    ("branch7x7dbl_5", 192, row[0], 1, row[1]),
                ],
                [("branch_pool", 192, 1, 1, 0)],
            ],
        )
    block(
        "Mixed_7a",
        [
            [("branch3x3_1", 192, 1, 1, 0), ("branch3x3_2", 320, 3, 2, 0)],
            [
                ("branch7x7x3_1", 192, 1, 1, 0),
                ("branch7x7x3_2", 192, row[0], 1, row[1]),
                ("branch7x7x3_3", 192, column[0], 1, column[1]),
                ("branch7x7x3_4", 192, 3, 2, 0),
            ],
        ],
        pooled=768,
    )
    for name in ("Mixed_7b", "Mixed_7c"):
        block(
            name,
            [
                [("branch1x1", 320, 1, 1, 0)],
                [("branch3x3_1", 384, 1, 1, 0), ("branch3x3_2", 384, _FORK, 1, 0)],
                [
                    ("branch3x3dbl_1", 448, 1, 1, 0),
                    ("branch3x3dbl_2", 384, 3, 1, 1),
                    ("branch3x3dbl_3", 384, _FORK, 1, 0),
                ],
                [("branch_pool", 192, 1, 1, 0)],
            ],
        )
    net.linear("fc", 2048, 1000)
    return tuple(net.layers)


_BUILDERS: dict[str, tuple[int, Callable[[], tuple[Layer, ...]]]] = {
    "resnet50": (224, lambda: _resnet(3, 4, 6, 3)),
    "resnet101": (224, lambda: _resnet(3, 4, 23, 3)),
    "resnet152": (224, lambda: _resnet(3, 8, 36, 3)),
    "inceptionv3": (299, _inceptionv3),
    "vgg16": (224, _vgg16),
    "alexnet": (224, _alexnet),
}
NAMES = tuple(_BUILDERS)


@cache
def get(name: str) -> Model:
    if name not in _BUILDERS:
        raise UserError(f"model: {name!r} is not known, use one of {', '.join(NAMES)}")
    pixels, build = _BUILDERS[name]
    return Model(name, pixels, build())
