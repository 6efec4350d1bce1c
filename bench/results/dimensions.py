"""Which conditions vary in a set of points, and the labels that tell its curves and rows apart.

Report, notebooks, terminal tables and compare label by these, so that no two curves or rows look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from bench import words
from bench.results.trial import Point

MODEL_NAMES = {
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "resnet152": "ResNet-152",
    "inceptionv3": "Inception V3",
    "vgg16": "VGG-16",
    "alexnet": "AlexNet",
    "mobilenetv2": "MobileNetV2",
    "efficientnet-b0": "EfficientNet-B0",
    "efficientnet-b4": "EfficientNet-B4",
    "vit-b16": "ViT-B/16",
    "bert-base": "BERT base",
    "bert-large": "BERT large",
    "gpt2": "GPT-2",
    "gpt2-medium": "GPT-2 medium",
    "gpt2-498m": "GPT-2 498M",
}
ENGINE_NAMES = {
    "horovod-mpi": "Horovod (MPI)",
    "horovod-gloo": "Horovod (Gloo)",
    "ddp": "PyTorch DDP",
    "ps": "parameter server",
    "ps-async": "parameter server, asynchronous",
    "easgd": "Elastic Averaging SGD",
    "local-sgd": "local SGD",
    "hogwild": "Hogwild",
    "fsdp": "PyTorch FSDP",
    "pipeline": "pipeline",
    "tensor": "split layers",
    "spatial": "tiles of the image",
}


def device_name(device: str) -> str:
    kind, _, profile = device.partition(":")
    return f"emulated {profile.upper()}" if kind == "emulated" else {"cuda": "GPU"}.get(kind, kind.upper())


def data_name(data: str) -> str:
    return "synthetic data" if data == "synthetic" else f"real data from {data.removeprefix('shards:')}"


# In the order of a label.
DIMENSIONS: dict[str, Callable[[Point], str]] = {
    "model": lambda point: MODEL_NAMES.get(point.model, point.model),
    "device": lambda point: device_name(point.device),
    "gpus_per_node": lambda point: f"{words.count(point.gpus_per_node, 'GPU')} per node",
    "engine": lambda point: ENGINE_NAMES.get(point.engine, point.engine),
    "compression": lambda point: "no compression" if point.compression == "none" else point.compression,
    "data": lambda point: data_name(point.data),
    "fabric": words.fabric,
    "rate": lambda point: f"{point.rate_gbps:g} Gbit/s",
    "nodes": lambda point: words.count(point.nodes, "node"),
    "batch": lambda point: f"batch {point.batch}",
    "repeat": lambda point: f"repeat {point.repeat + 1}",
}


def varying(points: Iterable[Point], without: Collection[str] = ()) -> list[str]:
    """The dimensions in which the points differ. The rate is one only where a fabric's name has two rates."""
    points = list(points)
    names = [name for name, text in DIMENSIONS.items() if len({text(point) for point in points}) > 1]
    rates = {(words.fabric(point), point.rate_gbps) for point in points}
    if len(rates) == len({name for name, _ in rates}):
        names = [name for name in names if name != "rate"]
    return [name for name in names if name not in without]


def label(point: Point, names: Iterable[str]) -> str:
    return ", ".join(DIMENSIONS[name](point) for name in names)
