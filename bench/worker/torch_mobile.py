"""MobileNetV2 and EfficientNet in plain torch. bench/catalogue/mobile.py has tables of their sizes."""

from collections.abc import Callable

import torch
from torch import nn

from bench.worker.model_sizes import EFFICIENTNET, EFFICIENTNETS, MOBILENET_V2, Stage, blocks, channels

CLASSES = 1000
Activation = Callable[[], nn.Module]


def unit(inputs: int, out: int, kernel: int, activation: Activation, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), activation())


class Squeeze(nn.Module):
    """Squeeze and excitation: scales each channel by a function of all channels' means."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        to, back = nn.Conv2d(size, hidden, 1), nn.Conv2d(hidden, size, 1)
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), to, nn.SiLU(inplace=True), back, nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale(x)


class InvertedResidual(nn.Module):
    def __init__(
        self, inputs: int, out: int, kernel: int, stride: int, expansion: int, activation: Activation, squeeze: bool
    ) -> None:
        super().__init__()
        inner = channels(inputs * expansion)
        layers: list[nn.Module] = [unit(inputs, inner, 1, activation)] if expansion != 1 else []
        layers.append(unit(inner, inner, kernel, activation, stride, groups=inner))
        if squeeze:
            layers.append(Squeeze(inner, max(1, inputs // 4)))
        self.main = nn.Sequential(*layers, unit(inner, out, 1, nn.Identity))
        self.adds = stride == 1 and inputs == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.main(x)
        return x + y if self.adds else y


def network(stages: tuple[Stage, ...], width: float, depth: float, squeeze: bool) -> nn.Sequential:
    def activation() -> nn.Module:
        return nn.SiLU(inplace=True) if squeeze else nn.ReLU6(inplace=True)

    inputs = channels(32 * width)
    layers: list[nn.Module] = [unit(3, inputs, 3, activation, stride=2)]
    for expansion, kernel, stride, out in blocks(stages, width, depth):
        layers.append(InvertedResidual(inputs, out, kernel, stride, expansion, activation, squeeze))
        inputs = out
    last = 4 * inputs
    head = unit(inputs, last, 1, activation)
    return nn.Sequential(
        *layers, head, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(last, CLASSES)
    )


def mobilenetv2() -> nn.Sequential:
    return network(MOBILENET_V2, 1.0, 1.0, squeeze=False)


def efficientnet(name: str) -> nn.Sequential:
    _, width, depth = EFFICIENTNETS[name]
    return network(EFFICIENTNET, width, depth, squeeze=True)
