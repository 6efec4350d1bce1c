"""Turn a JPEG into training pixels: random-resized crop, horizontal flip, normalisation.

libjpeg-turbo (simplejpeg) decodes a large image at a half, a quarter or an eighth of its size when the crop keeps
enough pixels. OpenCV resizes only the crop.
"""

import math
import random
import threading

import cv2
import numpy
import simplejpeg
from numpy.typing import NDArray

PIXELS = 224
AREA = (0.08, 1.0)
RATIO = (math.log(3 / 4), math.log(4 / 3))
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
Bytes = bytes | memoryview
Pixels = NDArray[numpy.uint8]
Box = tuple[int, int, int, int]

# The loader has its own threads, one per core.
cv2.setNumThreads(1)


class NotAnImage(ValueError):
    """The bytes are not a JPEG that can be decoded."""


def crop_box(draw: random.Random, width: int, height: int) -> Box:
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
    """Buffers that a thread reuses for every image. Allocating them each time costs as much as the work itself."""

    def __init__(self) -> None:
        self.buffers: dict[str, Pixels] = {}

    def array(self, name: str, shape: tuple[int, ...]) -> Pixels:
        size = math.prod(shape)
        found = self.buffers.get(name)
        if found is None or found.size < size:
            found = self.buffers[name] = numpy.empty(size + size // 4, numpy.uint8)
        return found[:size].reshape(shape)


SCRATCH = Scratch()


def decode(jpeg: Bytes, box: Box, size: tuple[int, int], pixels: int) -> Pixels:
    """The whole image as RGBX, at the smallest scale at which the crop has at least `pixels` each way.

    The result is valid until the thread decodes the next image.
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
            buffer=SCRATCH.array("image", (width * height * 4,)),
        )
    except ValueError as error:
        raise NotAnImage(str(error)) from None
    return found


def crop(image: Pixels, box: Box, size: tuple[int, int]) -> Pixels:
    """The box of the full-size image, as a view of the decoded one, which may be smaller."""
    height, width, _ = image.shape
    x, y = width / size[0], height / size[1]
    left, top = min(round(box[0] * x), width - 1), min(round(box[1] * y), height - 1)
    right, bottom = round((box[0] + box[2]) * x), round((box[1] + box[3]) * y)
    return image[top : max(bottom, top + 1), left : max(right, left + 1)]


def resize(image: Pixels, pixels: int, flip: bool, out: Pixels | None = None) -> Pixels:
    """An RGBX image as pixels x pixels, bilinear; into `out` if given.

    The decoder has already averaged whatever shrinks to a half or less. INTER_AREA would average the rest too, but it
    takes four times as long.
    """
    if out is None:
        out = numpy.empty((pixels, pixels, 4), numpy.uint8)
    if flip:
        resized = SCRATCH.array("resized", (pixels, pixels, 4))
        cv2.resize(image, (pixels, pixels), resized, interpolation=cv2.INTER_LINEAR)
        cv2.flip(resized, 1, out)
    else:
        cv2.resize(image, (pixels, pixels), out, interpolation=cv2.INTER_LINEAR)
    return out


def augment(jpeg: Bytes, draw: random.Random, pixels: int = PIXELS, out: Pixels | None = None) -> Pixels:
    """Decode, crop, resize and flip at random: pixels x pixels x RGBX, into `out` if given."""
    size = size_of(jpeg)
    box = crop_box(draw, *size)
    return resize(crop(decode(jpeg, box, size, pixels), box, size), pixels, draw.random() < 0.5, out)


FACTORS = [numpy.float32(1 / 255 / deviation) for deviation in DEVIATION]
SHIFTS = [numpy.float32(-mean / deviation) for mean, deviation in zip(MEAN, DEVIATION, strict=True)]


def normalise(image: Pixels, planes: NDArray[numpy.float32]) -> None:
    """Write 3 x height x width floats, for training on a CPU. A GPU gets the bytes and normalises them itself."""
    for channel, (factor, shift) in enumerate(zip(FACTORS, SHIFTS, strict=True)):
        plane = planes[channel]
        plane[...] = image[..., channel]
        plane *= factor
        plane += shift
