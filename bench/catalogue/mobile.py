"""MobileNetV2 and EfficientNet: inverted residual blocks with depthwise convolutions, as torchvision defines them."""

from __future__ import annotations

from bench.catalogue.layers import Builder, Layer
from bench.worker.model_sizes import EFFICIENTNET, EFFICIENTNETS, MOBILENET_V2, Stage, blocks, channels


def _inverted_residuals(stages: tuple[Stage, ...], pixels: int, width: float, depth: float, squeeze: bool) -> Builder:
    net = Builder(pixels)

    def unit(name: str, out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        net.conv(f"{name}.conv", out, kernel, stride, groups=groups)
        net.norm(f"{name}.bn")

    unit("features.0", channels(32 * width), 3, 2)
    for number, (expansion, kernel, stride, out) in enumerate(blocks(stages, width, depth), start=1):
        prefix, inputs = f"features.{number}", net.size[0]
        inner = channels(inputs * expansion)
        if expansion != 1:
            unit(f"{prefix}.expand", inner, 1)
        unit(f"{prefix}.depthwise", inner, kernel, stride, groups=inner)
        if squeeze:
            net.squeeze(f"{prefix}.squeeze", max(1, inputs // 4))
        unit(f"{prefix}.project", out, 1)
    return net


def mobilenetv2() -> tuple[Layer, ...]:
    net = _inverted_residuals(MOBILENET_V2, 224, 1.0, 1.0, squeeze=False)
    return _with_head(net)


def efficientnet(name: str) -> tuple[Layer, ...]:
    pixels, width, depth = EFFICIENTNETS[name]
    net = _inverted_residuals(EFFICIENTNET, pixels, width, depth, squeeze=True)
    return _with_head(net)


def _with_head(net: Builder) -> tuple[Layer, ...]:
    width = 4 * net.size[0]
    net.conv("head.conv", width, 1)
    net.norm("head.bn")
    net.linear("classifier", width, 1000)
    return tuple(net.layers)
