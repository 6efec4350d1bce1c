"""Synthetic images with ImageNet's sizes: JPEG, mostly 500 x 375, about 110 KB, 1,000 classes.

An image depends only on the seed and its number, so any part of the set can be made again.
"""

from __future__ import annotations

import numpy
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

CLASSES = 1000
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
OCTAVES = ((4, 60.0), (16, 35.0), (64, 18.0))


def key(number: int) -> str:
    return f"synthetic_{number:08d}"


def label(seed: int, number: int) -> int:
    return int(numpy.random.default_rng([seed, number, 1]).integers(CLASSES))


def image(seed: int, number: int) -> bytes:
    draw = numpy.random.default_rng([seed, number])
    shares = numpy.cumsum([share for _, _, share, _, _ in SHAPES])
    width, height, _, noise, quality = SHAPES[int(numpy.searchsorted(shares, draw.random() * shares[-1], "right"))]
    # Photographs differ in the amount of fine detail.
    detail = float(draw.lognormal(0, 0.35))
    pixels = paint(draw, width, height, noise * detail)
    jpeg: bytes = simplejpeg.encode_jpeg(pixels, quality=quality, colorsubsampling="420")
    return jpeg


def paint(draw: numpy.random.Generator, width: int, height: int, noise: float) -> NDArray[numpy.uint8]:
    """Smooth colour fields from coarse to fine, plus grain."""
    total = numpy.full((height, width, 3), 128.0, numpy.float32)
    for cells, strength in OCTAVES:
        coarse = draw.integers(0, 256, (cells * 3 // 4, cells, 3), numpy.uint8)
        field = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
        total += (numpy.asarray(field, numpy.float32) - 127.5) * numpy.float32(strength / 64)
    grain = draw.standard_normal((height, width, 1), numpy.float32)
    total += grain * numpy.float32(noise)
    return numpy.clip(total, 0, 255).astype(numpy.uint8)
