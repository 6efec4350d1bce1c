"""A network as a list of layers: parameter shapes and multiply-accumulates, and a builder that tracks image sizes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """One layer that has parameters. `shapes` are in the order in which the framework registers them.

    `inputs` are the values that it reads per sample, `halo` those of the rows that a tile of an image needs from its
    neighbours, both above and below one cut. Transformers have neither.
    """

    name: str
    shapes: tuple[Shape, ...]
    macs: int
    inputs: int = 0
    halo: int = 0

    @property
    def parameters(self) -> tuple[int, ...]:
        """Number of elements of each parameter tensor, and so of each gradient."""
        return tuple(prod(shape) for shape in self.shapes)


class Builder:
    """Appends layers and tracks the size of the activations: channels, height and width."""

    def __init__(self, pixels: int) -> None:
        self.size = (3, pixels, pixels)
        self.layers: list[Layer] = []

    def conv(
        self,
        name: str,
        out: int,
        kernel: int | Shape,
        stride: int = 1,
        pad: int | None = None,
        bias: bool = False,
        groups: int = 1,
    ) -> None:
        """Without `pad` it is half the kernel, which keeps height and width at stride 1."""
        kernels = (kernel, kernel) if isinstance(kernel, int) else kernel
        inputs, *before = self.size
        height, width = (
            (pixels + 2 * (side // 2 if pad is None else pad) - side) // stride + 1
            for pixels, side in zip(before, kernels, strict=True)
        )
        weight: Shape = (out, inputs // groups, *kernels)
        shapes = (weight, (out,)) if bias else (weight,)
        halo = max(0, kernels[0] - stride) * inputs * before[1]
        self.layers.append(Layer(name, shapes, prod(weight) * height * width, prod(self.size), halo))
        self.size = (out, height, width)

    def norm(self, name: str) -> None:
        self.layers.append(Layer(name, ((self.size[0],), (self.size[0],)), 0, prod(self.size)))

    def linear(self, name: str, inputs: int, out: int) -> None:
        self.layers.append(Layer(name, ((out, inputs), (out,)), inputs * out, inputs))

    def pool(self, kernel: int, stride: int, pad: int = 0) -> None:
        channels, height, width = self.size
        self.size = (channels, (height + 2 * pad - kernel) // stride + 1, (width + 2 * pad - kernel) // stride + 1)

    def squeeze(self, name: str, hidden: int) -> None:
        """Squeeze and excitation: two 1x1 convolutions of the channels' means."""
        channels = self.size[0]
        for number, (inputs, out) in enumerate(((channels, hidden), (hidden, channels)), start=1):
            self.layers.append(Layer(f"{name}.fc{number}", ((out, inputs, 1, 1), (out,)), inputs * out, inputs))
