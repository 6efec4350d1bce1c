"""Synthetic images with ImageNet's sizes: JPEG, mostly 500 x 375, about 110 KB, 1,000 classes that a network can learn.

A class is a pattern in two colours: its number's last digit gives the bright colour, the one before the dark colour,
the rest the direction of the stripes. An image depends only on the seed, its number and the number of classes, so any
part of the set can be made again.
"""

from __future__ import annotations

import colorsys
import math

import numpy
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

CLASSES = 1000
# Raise it with every change of the images or labels: shards of two versions do not belong in one data set.
VERSION = 2
MEAN_BYTES = 110_000
# Width, height, share of the images, standard deviation of the noise, JPEG quality. Most images of ImageNet were scaled
# to 500 pixels when it was collected. Some are smaller, and a few have the size that the camera gave them.
SHAPES = (
    (500, 375, 0.58, 20, 91),
    (375, 500, 0.16, 20, 91),
    (500, 333, 0.14, 20, 91),
    (333, 500, 0.05, 20, 91),
    (240, 180, 0.04, 18, 90),
    (1024, 768, 0.02, 8, 85),
    (1600, 1200, 0.01, 8, 82),
)
OCTAVES = ((4, 25.0), (16, 35.0), (64, 18.0))


def key(number: int) -> str:
    return f"synthetic_{number:08d}"


def label(seed: int, number: int, classes: int = CLASSES) -> int:
    return int(numpy.random.default_rng([seed, number, 1]).integers(classes))


def image(seed: int, number: int, classes: int = CLASSES) -> bytes:
    draw = numpy.random.default_rng([seed, number])
    shares = numpy.cumsum([share for _, _, share, _, _ in SHAPES])
    width, height, _, noise, quality = SHAPES[int(numpy.searchsorted(shares, draw.random() * shares[-1], "right"))]
    # Photographs differ in the amount of fine detail.
    detail = float(draw.lognormal(0, 0.35))
    pixels = paint(draw, label(seed, number, classes), width, height, noise * detail)
    jpeg: bytes = simplejpeg.encode_jpeg(pixels, quality=quality, colorsubsampling="420")
    return jpeg


def paint(draw: numpy.random.Generator, number: int, width: int, height: int, noise: float) -> NDArray[numpy.uint8]:
    """The pattern of class `number`, smooth colour fields from coarse to fine, and grain."""
    total = pattern(draw, number, width, height)
    for cells, strength in OCTAVES:
        coarse = draw.integers(0, 256, (cells * 3 // 4, cells, 3), numpy.uint8)
        field = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
        total += (numpy.asarray(field, numpy.float32) - 127.5) * numpy.float32(strength / 64)
    grain = draw.standard_normal((height, width, 1), numpy.float32)
    total += grain * numpy.float32(noise)
    return numpy.clip(total, 0, 255).astype(numpy.uint8)


def pattern(draw: numpy.random.Generator, number: int, width: int, height: int) -> NDArray[numpy.float32]:
    """Stripes of a class; every image has its own phase and width of the stripes, so no two images are the same."""
    rest, hue = divmod(number, 10)
    direction, dark_hue = divmod(rest, 10)
    bright = numpy.array(colorsys.hsv_to_rgb(hue / 10, 0.6, 0.75), numpy.float32) * 255
    dark = numpy.array(colorsys.hsv_to_rgb(dark_hue / 10, 0.6, 0.45), numpy.float32) * 255
    # From 0 to 90 degrees only: a mirrored image must not look like another class.
    angle = direction % 10 * math.pi / 18
    stripes = draw.uniform(2, 4) * 2 * math.pi / max(width, height)
    x = numpy.arange(width, dtype=numpy.float32) * numpy.float32(math.cos(angle) * stripes)
    y = numpy.arange(height, dtype=numpy.float32) * numpy.float32(math.sin(angle) * stripes)
    wave = numpy.sin(y[:, None] + x + numpy.float32(draw.uniform(0, 2 * math.pi)))[..., None]
    share = numpy.clip(wave + numpy.float32(0.65), 0, 1)
    return numpy.asarray(dark + (bright - dark) * share, numpy.float32)
