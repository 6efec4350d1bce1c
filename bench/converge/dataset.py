"""The stand-in images of `bench data make`, painted small: a class is a pattern of stripes in two colours."""

from __future__ import annotations

import io

import numpy

from bench.data import standin

PIXELS = 16
NOISE = 30.0
# The images on which accuracy is measured come from other seeds than those for training.
TRAIN_SEED, TEST_SEED = 1, 2


def painted(seed: int, count: int, classes: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    labels = numpy.array([standin.label(seed, number, classes) for number in range(count)], numpy.uint8)
    images = numpy.empty((count, PIXELS, PIXELS, 3), numpy.uint8)
    for number, label in enumerate(labels):
        draw = numpy.random.default_rng([seed, number])
        images[number] = standin.paint(draw, int(label), PIXELS, PIXELS, NOISE)
    return images.transpose(0, 3, 1, 2), labels


def encode(train: int, test: int, classes: int) -> bytes:
    """One file for all nodes."""
    x, y = painted(TRAIN_SEED, train, classes)
    test_x, test_y = painted(TEST_SEED, test, classes)
    file = io.BytesIO()
    numpy.savez(file, x=x, y=y, test_x=test_x, test_y=test_y)
    return file.getvalue()
