"""The networks of the examples: ResNet-50 for GPUs, and a small one that trains on a CPU in seconds."""

import torch
from torch import nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut around them."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.main = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, 1),
        )
        # Each block starts as the identity (Goyal et al. 2017): this makes the first epochs at a large batch stable.
        nn.init.zeros_(self.main[-1].weight)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))

    def forward(self, x):
        return torch.relu(self.main(x) + self.shortcut(x))


def convolution(inputs, outputs, kernel, stride=1):
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out")
    return conv, nn.BatchNorm2d(outputs)


def resnet50(classes):
    layers = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 1 if block else stride))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def small(classes):
    """Three convolutions with GroupNorm.

    GroupNorm looks at one image at a time. BatchNorm keeps running statistics of the batches that a process has seen,
    so they depend on the number of processes. With GroupNorm nothing does, and 1, 2 and 4 nodes train the same weights.
    """
    layers = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


MODELS = {"resnet50": resnet50, "small": small}
