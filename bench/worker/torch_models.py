"""The models in plain torch, for devices that train. bench/catalogue/models.py has tables of their sizes."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from bench.worker import torch_mobile, torch_transformers

CLASSES = 1000


Kernel = int | tuple[int, int]


def conv_norm(inputs: int, outputs: int, kernel: Kernel, eps: float = 1e-5, **options: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, bias=False, **options), nn.BatchNorm2d(outputs, eps=eps))


def conv_relu(inputs: int, outputs: int, kernel: int, **options: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, **options), nn.ReLU(inplace=True))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut; the 3x3 has the stride (ResNet v1.5)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.main = nn.Sequential(
            conv_norm(inputs, width, 1),
            nn.ReLU(inplace=True),
            conv_norm(width, width, 3, stride=stride, padding=1),
            nn.ReLU(inplace=True),
            conv_norm(width, outputs, 1),
        )
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else conv_norm(inputs, outputs, 1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.main(x) + self.shortcut(x), inplace=True)


def resnet(*blocks: int) -> nn.Sequential:
    stem = (conv_norm(3, 64, 7, stride=2, padding=3), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))
    layers: list[nn.Module] = []
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for i in range(count):
            layers.append(Bottleneck(inputs, width, 2 if stage and not i else 1))
            inputs = 4 * width
    return nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def dense(inputs: int, dropout_first: bool) -> list[nn.Module]:
    """The classifier of VGG and AlexNet: two hidden layers of 4096 units and the output layer."""
    hidden: list[nn.Module] = []
    for size in (inputs, 4096):
        block: list[nn.Module] = [nn.Linear(size, 4096), nn.ReLU(inplace=True)]
        hidden += [nn.Dropout(), *block] if dropout_first else [*block, nn.Dropout()]
    return [*hidden, nn.Linear(4096, CLASSES)]


def vgg16() -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append(conv_relu(inputs, width, 3, padding=1))
            inputs = width
        layers.append(nn.MaxPool2d(2, stride=2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *dense(512 * 49, dropout_first=False))


def alexnet() -> nn.Sequential:
    return nn.Sequential(
        conv_relu(3, 64, 11, stride=4, padding=2),
        nn.MaxPool2d(3, stride=2),
        conv_relu(64, 192, 5, padding=2),
        nn.MaxPool2d(3, stride=2),
        conv_relu(192, 384, 3, padding=1),
        conv_relu(384, 256, 3, padding=1),
        conv_relu(256, 256, 3, padding=1),
        nn.MaxPool2d(3, stride=2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        *dense(256 * 36, dropout_first=True),
    )


class Branches(nn.Module):
    """Several paths side by side, joined along the channels."""

    def __init__(self, *paths: nn.Module) -> None:
        super().__init__()
        self.paths = nn.ModuleList(paths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([path(x) for path in self.paths], 1)


def unit(inputs: int, outputs: int, kernel: Kernel, **options: int) -> nn.Sequential:
    """Convolution, normalisation and ReLU; 1xn and nx1 kernels are padded to keep the image size."""
    if isinstance(kernel, tuple):
        options = {**options, "padding": (kernel[0] // 2, kernel[1] // 2)}  # type: ignore[dict-item]
    return nn.Sequential(conv_norm(inputs, outputs, kernel, eps=1e-3, **options), nn.ReLU(inplace=True))


def average() -> nn.Module:
    return nn.AvgPool2d(3, stride=1, padding=1)


def inception_a(inputs: int, pooled: int) -> Branches:
    return Branches(
        unit(inputs, 64, 1),
        nn.Sequential(unit(inputs, 48, 1), unit(48, 64, 5, padding=2)),
        nn.Sequential(unit(inputs, 64, 1), unit(64, 96, 3, padding=1), unit(96, 96, 3, padding=1)),
        nn.Sequential(average(), unit(inputs, pooled, 1)),
    )


def inception_c(width: int) -> Branches:
    wide, tall = (1, 7), (7, 1)
    middle = (unit(width, width, kernel) for kernel in (tall, wide, tall))
    return Branches(
        unit(768, 192, 1),
        nn.Sequential(unit(768, width, 1), unit(width, width, wide), unit(width, 192, tall)),
        nn.Sequential(unit(768, width, 1), *middle, unit(width, 192, wide)),
        nn.Sequential(average(), unit(768, 192, 1)),
    )


def inception_e(inputs: int) -> Branches:
    def split() -> Branches:
        return Branches(unit(384, 384, (1, 3)), unit(384, 384, (3, 1)))

    return Branches(
        unit(inputs, 320, 1),
        nn.Sequential(unit(inputs, 384, 1), split()),
        nn.Sequential(unit(inputs, 448, 1), unit(448, 384, 3, padding=1), split()),
        nn.Sequential(average(), unit(inputs, 192, 1)),
    )


def inceptionv3() -> nn.Sequential:
    """Without the auxiliary classifier, which only training for accuracy needs."""
    return nn.Sequential(
        unit(3, 32, 3, stride=2),
        unit(32, 32, 3),
        unit(32, 64, 3, padding=1),
        nn.MaxPool2d(3, stride=2),
        unit(64, 80, 1),
        unit(80, 192, 3),
        nn.MaxPool2d(3, stride=2),
        inception_a(192, 32),
        inception_a(256, 64),
        inception_a(288, 64),
        Branches(
            unit(288, 384, 3, stride=2),
            nn.Sequential(unit(288, 64, 1), unit(64, 96, 3, padding=1), unit(96, 96, 3, stride=2)),
            nn.MaxPool2d(3, stride=2),
        ),
        *(inception_c(width) for width in (128, 160, 160, 192)),
        Branches(
            nn.Sequential(unit(768, 192, 1), unit(192, 320, 3, stride=2)),
            nn.Sequential(
                unit(768, 192, 1), unit(192, 192, (1, 7)), unit(192, 192, (7, 1)), unit(192, 192, 3, stride=2)
            ),
            nn.MaxPool2d(3, stride=2),
        ),
        inception_e(1280),
        inception_e(2048),
        nn.AdaptiveAvgPool2d(1),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(2048, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": lambda: resnet(3, 4, 6, 3),
    "resnet101": lambda: resnet(3, 4, 23, 3),
    "resnet152": lambda: resnet(3, 8, 36, 3),
    "vgg16": vgg16,
    "alexnet": alexnet,
    "inceptionv3": inceptionv3,
    "mobilenetv2": torch_mobile.mobilenetv2,
    "efficientnet-b0": lambda: torch_mobile.efficientnet("efficientnet-b0"),
    "efficientnet-b4": lambda: torch_mobile.efficientnet("efficientnet-b4"),
    "vit-b16": torch_transformers.vit_b16,
    "bert-base": lambda: torch_transformers.language_model("bert-base"),
    "bert-large": lambda: torch_transformers.language_model("bert-large"),
    "gpt2": lambda: torch_transformers.language_model("gpt2"),
    "gpt2-medium": lambda: torch_transformers.language_model("gpt2-medium"),
    "gpt2-498m": lambda: torch_transformers.language_model("gpt2-498m"),
}


def seeded(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]()
