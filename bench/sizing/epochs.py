"""Epochs to an accuracy against the global batch, fitted on published runs: E = Emin (1 + B / Bnoise)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from bench.catalogue.gpu_rates import published
from cluster.core.errors import UserError

IMAGENET = 1_281_167
# A factor on the root mean square of what is left when a batch is left out. All points of MLPerf's LARS lie inside.
SPREAD = 2.0
# Goyal et al.: 90 epochs of SGD end between 76.3 and 76.5% up to this batch, and lower above it.
SGD_EPOCHS, SGD_BATCH, SGD_TOP1, SGD_FITTED_TOP1 = 90.0, 8192, 76.26, 75.0


@dataclass(frozen=True)
class Workload:
    """Which rows of steps_to_accuracy.csv answer for a model, an optimizer and targets up to `target`."""

    model: str
    optimizer: str
    target: float
    name: str
    rows_optimizer: str
    rows_target: str
    # Samples of one epoch; 1 where the source counts samples.
    samples: int
    # Length of the sequences that were trained on.
    seq_len: int | None = None


WORKLOADS = (
    Workload("resnet50", "lars", 75.9, "ResNet-50 v1.5 ImageNet", "lars", "75.90%", IMAGENET),
    Workload("resnet50", "sgd", 70.0, "ResNet-50 ImageNet", "SGD+AdaScale", ">= 0.7", IMAGENET),
    Workload("resnet50", "sgd", 75.0, "ResNet-50 ImageNet", "SGD+AdaScale", ">= 0.75", IMAGENET),
    Workload("bert-large", "lamb", 72.0, "BERT-large phase 2", "lamb", ">= 0.720", 1, seq_len=512),
)
DEFAULT_OPTIMIZER = {"resnet50": "lars", "bert-large": "lamb"}
DEFAULT_TARGET = {"resnet50": 75.9, "bert-large": 72.0}


@dataclass(frozen=True)
class Point:
    batch: int
    epochs: float


@dataclass(frozen=True)
class Need:
    """Epochs at a batch, with the 80% interval, and whether published batches include it."""

    epochs: float
    low: float
    high: float
    inside: bool


@dataclass(frozen=True)
class Curve:
    least: float
    noise_batch: float
    smallest: int
    largest: int
    # Root mean square of the relative errors when each batch is left out in turn, and their mean.
    error: float
    mean_error: float
    points: int
    # Batch and relative error of the curve that was fitted without it.
    residuals: tuple[tuple[int, float], ...]

    def need(self, batch: int) -> Need:
        epochs = self.least * (1 + batch / self.noise_batch)
        doubt = math.exp(SPREAD * self.error)
        return Need(epochs, epochs / doubt, epochs * doubt, self.smallest <= batch <= self.largest)


def points(workload: Workload) -> tuple[Point, ...]:
    """One per batch: MLPerf repeats batches in several versions, so their mean counts once."""
    found: dict[int, list[float]] = {}
    for row in published("steps_to_accuracy"):
        if not row["workload"].startswith(workload.name) or row["optimizer"] != workload.rows_optimizer:
            continue
        target = row["target"].partition(" (")[0]
        value = row["epochs_to_target"] if workload.samples > 1 else row["samples_to_target"]
        if target.endswith(workload.rows_target) and value:
            found.setdefault(int(row["global_batch"]), []).append(float(value))
    return tuple(Point(batch, sum(values) / len(values)) for batch, values in sorted(found.items()))


def line(known: Sequence[Point]) -> tuple[float, float]:
    """Emin and Emin / Bnoise with the smallest relative errors; neither is negative."""
    w = [1 / point.epochs**2 for point in known]
    s, sb = sum(w), sum(a * point.batch for a, point in zip(w, known, strict=True))
    sbb = sum(a * point.batch**2 for a, point in zip(w, known, strict=True))
    se = sum(a * point.epochs for a, point in zip(w, known, strict=True))
    sbe = sum(a * point.batch * point.epochs for a, point in zip(w, known, strict=True))
    slope = max(1e-12, (s * sbe - sb * se) / (s * sbb - sb * sb))
    return (se - slope * sb) / s, slope


def fit(known: Sequence[Point]) -> Curve:
    misses = []
    for left_out in known:
        least, slope = line([point for point in known if point is not left_out])
        misses.append((least + slope * left_out.batch) / left_out.epochs - 1)
    least, slope = line(known)
    error = math.sqrt(sum(miss**2 for miss in misses) / len(misses))
    mean = sum(map(abs, misses)) / len(misses)
    residuals = tuple((point.batch, miss) for point, miss in zip(known, misses, strict=True))
    return Curve(least, least / slope, known[0].batch, known[-1].batch, error, mean, len(known), residuals)


@cache
def curve(workload: Workload) -> Curve:
    return fit(points(workload))


def choose(model: str, optimizer: str, target: float) -> Workload | None:
    """The workload whose target is the lowest that suffices; None for SGD's fixed schedule."""
    known = [one for one in WORKLOADS if (one.model, one.optimizer) == (model, optimizer)]
    enough = sorted((one for one in known if one.target >= target), key=lambda one: one.target)
    if enough:
        return enough[0]
    if (model, optimizer) == ("resnet50", "sgd") and SGD_FITTED_TOP1 < target <= SGD_TOP1:
        return None
    if not known:
        pairs = ", ".join(dict.fromkeys(f"{one.model} with {one.optimizer}" for one in WORKLOADS))
        raise UserError(f"--optimizer: no data for {model} with {optimizer}; there are {pairs}, or give --epochs")
    most = SGD_TOP1 if optimizer == "sgd" else max(one.target for one in known)
    raise UserError(
        f"--target: no data reach {target:g} with {model} and {optimizer}, at most {most:g}; or give --epochs"
    )


def fixed(batch: int) -> Need | None:
    """SGD's 90 epochs; None above the batch at which its accuracy falls."""
    return Need(SGD_EPOCHS, SGD_EPOCHS, SGD_EPOCHS, True) if batch <= SGD_BATCH else None
