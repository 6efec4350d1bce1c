"""From a JPEG to the pixels a network trains on: random-resized crop, flip, normalise, as fast as a core can.

What saves time against decoding everything with Pillow: a large image is decoded at the smallest scale that still has
the crop's pixels, only the crop is resampled, a pixel is moved as one word, and nothing is copied to flip it.
"""

from __future__ import annotations

import io
import math
import random
import threading
from typing import Any

import numpy
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

PIXELS = 224
AREA = (0.08, 1.0)
RATIO = (math.log(3 / 4), math.log(4 / 3))
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
Bytes = bytes | memoryview
Pixels = NDArray[numpy.uint8]


class NotAnImage(ValueError):
    """The bytes are not a JPEG that can be decoded."""


def crop_box(draw: random.Random, width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, width and height of a random-resized crop, as torchvision defines it."""
    for _ in range(10):
        area = width * height * draw.uniform(*AREA)
        ratio = math.exp(draw.uniform(*RATIO))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return draw.randint(0, width - w), draw.randint(0, height - h), w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def size_of(jpeg: Bytes) -> tuple[int, int]:
    """Width and height, from the header alone."""
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(jpeg)
    except ValueError as error:
        raise NotAnImage(str(error)) from None
    if space in ("CMYK", "YCCK"):
        raise NotAnImage(f"{space} instead of RGB")
    return width, height


class Scratch(threading.local):
    """Arrays that a thread uses for every image: to get and give back memory each time costs as much as the work."""

    def __init__(self) -> None:
        self.kept: dict[str, NDArray[Any]] = {}

    def array(self, name: str, shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
        size = math.prod(shape)
        found = self.kept.get(name)
        if found is None or found.size < size:
            found = self.kept[name] = numpy.empty(size + size // 4, kind)
        return found[:size].reshape(shape)


SCRATCH = Scratch()


def decode(jpeg: Bytes, box: tuple[int, int, int, int], size: tuple[int, int], pixels: int) -> Pixels:
    """The whole image as RGBX, at a scale of one half or less where the crop keeps at least `pixels` each way.

    It stays valid until the thread decodes the next one.
    """
    width, height = size
    try:
        found: Pixels = simplejpeg.decode_jpeg(
            jpeg,
            "RGBX",
            fastdct=True,
            fastupsample=True,
            min_width=min(width, math.ceil(width * pixels / box[2])),
            min_height=min(height, math.ceil(height * pixels / box[3])),
            # Scales between one half and one are slower to decode than the full size.
            min_factor=2,
            buffer=SCRATCH.array("image", (width * height * 4,), numpy.uint8),
        )
    except ValueError as error:
        raise NotAnImage(str(error)) from None
    return found


def positions(begin: float, length: float, end: int, pixels: int) -> tuple[NDArray[numpy.intp], NDArray[numpy.int16]]:
    """For each output pixel the input pixel before it, and how far it lies towards the next one, in 1/128."""
    where = (numpy.arange(pixels) + 0.5) * (length / pixels) + (begin - 0.5)
    numpy.clip(where, 0, end - 1.001, out=where)
    first = where.astype(numpy.intp)
    return first, ((where - first) * 128).astype(numpy.int16)


def blend(low: NDArray[numpy.int16], high: NDArray[numpy.int16], weights: NDArray[numpy.int16]) -> None:
    """low += (high - low) x weight / 128; high is used up."""
    high -= low
    high *= weights
    high >>= 7
    low += high


def resample(
    image: Pixels, box: tuple[float, float, float, float], pixels: int, flip: bool, out: Pixels | None = None
) -> Pixels:
    """The box of an RGBX image as pixels x pixels, bilinear; a flip costs nothing, the columns are read backwards.

    The decoder has already averaged whatever is to shrink to a half or less.
    """
    height, width, _ = image.shape
    left, top, across, down = box
    rows, row_weights = positions(top, down, height, pixels)
    columns, column_weights = positions(left, across, width, pixels)
    begin, end = int(columns[0]), int(columns[-1]) + 2
    if flip:
        columns, column_weights = columns[::-1], column_weights[::-1]
    # A pixel is moved as one word, of 32 bits as it was decoded and of 64 between the two passes.
    words = image.view(numpy.uint32)[..., 0]
    line = SCRATCH.array("line", (pixels, width), numpy.uint32)
    part = line.view(numpy.uint8)[:, 4 * begin : 4 * end]
    low = SCRATCH.array("low", part.shape, numpy.int16)
    high = SCRATCH.array("high", part.shape, numpy.int16)
    # Whole rows: of an array that is not in one piece numpy would make a copy first. mode="clip": with the default it
    # would make one of `out`.
    words.take(rows, 0, line, "clip")
    numpy.copyto(low, part)
    words.take(rows + 1, 0, line, "clip")
    numpy.copyto(high, part)
    blend(low, high, row_weights[:, None])
    lines = low.view(numpy.uint64)
    columns = columns - begin
    shape = (pixels, pixels)
    near = lines.take(columns, 1, SCRATCH.array("near", shape, numpy.uint64), "clip").view(numpy.int16)
    far = lines.take(columns + 1, 1, SCRATCH.array("far", shape, numpy.uint64), "clip").view(numpy.int16)
    blend(near, far, column_weights.repeat(4))
    found = numpy.empty((pixels, pixels, 4), numpy.uint8) if out is None else out
    numpy.copyto(found.reshape(pixels, pixels * 4), near, casting="unsafe")
    return found


def augment(jpeg: Bytes, draw: random.Random, pixels: int = PIXELS, out: Pixels | None = None) -> Pixels:
    """Decode, crop and perhaps flip: pixels x pixels x RGBX, into `out` where it is given."""
    size = size_of(jpeg)
    box = crop_box(draw, *size)
    image = decode(jpeg, box, size, pixels)
    x, y = image.shape[1] / size[0], image.shape[0] / size[1]
    return resample(image, (box[0] * x, box[1] * y, box[2] * x, box[3] * y), pixels, draw.random() < 0.5, out)


FACTORS = [numpy.float32(1 / 255 / deviation) for deviation in DEVIATION]
SHIFTS = [numpy.float32(-mean / deviation) for mean, deviation in zip(MEAN, DEVIATION, strict=True)]


def normalise(image: Pixels, planes: NDArray[numpy.float32]) -> None:
    """As 3 x height x width floats: what training on a CPU takes. A GPU gets the bytes and does this by itself."""
    for channel, (factor, shift) in enumerate(zip(FACTORS, SHIFTS, strict=True)):
        plane = planes[channel]
        plane[...] = image[..., channel]
        plane *= factor
        plane += shift


def usual(jpeg: bytes, draw: random.Random, pixels: int = PIXELS) -> NDArray[numpy.float32]:
    """What most training scripts do, for comparison: Pillow decodes everything, then crop, resize, flip, to tensor."""
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    left, top, width, height = crop_box(draw, *image.size)
    image = image.crop((left, top, left + width, top + height)).resize((pixels, pixels), Image.Resampling.BILINEAR)
    if draw.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    # torchvision's ToTensor and Normalize, step by step.
    planes = numpy.ascontiguousarray(numpy.array(image).transpose(2, 0, 1))
    tensor = planes.astype(numpy.float32) / numpy.float32(255)
    tensor -= numpy.array(MEAN, numpy.float32)[:, None, None]
    tensor /= numpy.array(DEVIATION, numpy.float32)[:, None, None]
    return tensor
