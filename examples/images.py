"""The images of the examples: which ones a step uses, how they are read, and how they are augmented.

Nothing here depends on the number of processes. A step takes the same images in the same micro-batches on 1, 2 or 4
nodes, and an image is cropped in the same way wherever it is used. Only the standard library, numpy and Pillow are
needed.
"""

import io
import json
import math
import os
import random
from pathlib import Path

import numpy
from PIL import Image


def cut(items, pieces):
    """Cut a list into pieces whose lengths differ by one at most. Nothing is left out, nothing is used twice."""
    return [items[len(items) * n // pieces : len(items) * (n + 1) // pieces] for n in range(pieces)]


class Order:
    """The images of every step: a shuffled epoch, cut into steps, each cut into micro-batches.

    The order follows from (seed, epoch) alone, so a run can resume at any step and on another number of nodes.
    """

    def __init__(self, numbers, batch, micro_batches, seed):
        self.numbers, self.micro_batches, self.seed = list(numbers), micro_batches, seed
        if len(self.numbers) < micro_batches:
            raise SystemExit(f"{len(self.numbers)} images do not fill {micro_batches} micro-batches: use more images")
        self.steps_per_epoch = math.ceil(len(self.numbers) / (batch * micro_batches))

    def step_size(self, step):
        """Images of a step, over all processes."""
        place, count = step % self.steps_per_epoch, len(self.numbers)
        return count * (place + 1) // self.steps_per_epoch - count * place // self.steps_per_epoch

    def epoch(self, epoch):
        """Steps of micro-batches of (epoch, number of the image)."""
        shuffled = [(epoch, number) for number in self.numbers]
        random.Random(f"{self.seed}/{epoch}").shuffle(shuffled)
        return [cut(step, self.micro_batches) for step in cut(shuffled, self.steps_per_epoch)]

    def micro_batches_of(self, rank, size, first, last):
        """What process `rank` of `size` trains on in steps first to last, one micro-batch after the other."""
        steps, known = [], -1
        for step in range(first, last):
            epoch, place = divmod(step, self.steps_per_epoch)
            if epoch != known:
                steps, known = self.epoch(epoch), epoch
            yield from steps[place][rank::size]


class Pictures:
    """A data set for torch's DataLoader. An item is (epoch, number of an image); epoch -1 stands for the test.

    Random numbers come from the epoch and the image. If they came from the process or the DataLoader's worker, another
    number of nodes would train on other crops.
    """

    def __init__(self, source, pixels, seed):
        self.source, self.pixels, self.seed = source, pixels, seed

    def __getitem__(self, item):
        epoch, number = item
        picture, label = self.source.read(number)
        draw = random.Random(f"{self.seed}/{epoch}/{number}") if epoch >= 0 else None
        return numpy.ascontiguousarray(prepare(picture, self.pixels, draw).transpose(2, 0, 1)), label


def prepare(picture, pixels, draw=None):
    """Crop and resize: at random with `draw` (random-resized crop and flip), else the middle of the image."""
    width, height = picture.size
    side = 0.875 * min(width, height)
    box = [(width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2]
    if draw:
        area, ratio = width * height * draw.uniform(0.25, 1), math.exp(draw.uniform(-0.28, 0.28))
        w, h = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
        left, top = draw.uniform(0, width - w), draw.uniform(0, height - h)
        box = [left, top, left + w, top + h]
    # A photo is often much larger than the crop needs. libjpeg can decode it at a half, a quarter or an eighth.
    picture.draft("RGB", [math.ceil(full * pixels / min(box[2] - box[0], box[3] - box[1])) for full in picture.size])
    scale = [picture.size[0] / width, picture.size[1] / height] * 2
    box = [edge * factor for edge, factor in zip(box, scale, strict=True)]
    found = numpy.asarray(picture.convert("RGB").resize((pixels, pixels), Image.Resampling.BILINEAR, box))
    return found[:, ::-1] if draw and draw.random() < 0.5 else found


class Shards:
    """A data set of `bench data`: index.json, tar files, and for each an .idx with the offsets of its images."""

    def __init__(self, folder):
        self.folder = Path(folder)
        try:
            index = json.loads((self.folder / "index.json").read_text())
        except OSError as error:
            raise SystemExit(f"--data: {error.filename}: {error.strerror}; `bench data` makes data sets") from None
        self.classes, self.samples = index["classes"], []
        for shard in index["shards"]:
            for line in (self.folder / shard["name"]).with_suffix(".idx").read_text().splitlines()[1:]:
                # jpg OFFSET SIZE KEY.jpg cls OFFSET SIZE KEY.cls
                words = line.split()
                self.samples.append((shard["name"], *(int(words[place]) for place in (1, 2, 5, 6))))
        self.files = {}

    def __len__(self):
        return len(self.samples)

    def __getstate__(self):
        # The workers of a DataLoader get a copy of this object. Open files cannot be copied.
        return {**self.__dict__, "files": {}}

    def read(self, number):
        name, image, size, label, digits = self.samples[number]
        if name not in self.files:
            self.files[name] = os.open(self.folder / name, os.O_RDONLY)
        file = self.files[name]
        return Image.open(io.BytesIO(os.pread(file, size, image))), int(os.pread(file, digits, label))


class Synthetic:
    """Images that need no files: each class has a colour, each image its own noise."""

    def __init__(self, images, classes):
        self.images, self.classes = images, classes

    def __len__(self):
        return self.images

    def read(self, number):
        label = number % self.classes
        colour = numpy.random.default_rng([label]).uniform(64, 192, 3)
        noise = numpy.random.default_rng([label, number]).normal(0, 40, (64, 64, 3))
        return Image.fromarray(numpy.clip(colour + noise, 0, 255).astype(numpy.uint8)), label


def load(data):
    """The training and the held-out images of a data set: two pairs of (source, numbers of its images)."""
    if data == "synthetic":
        source = Synthetic(2000, 10)
    else:
        folder = Path(os.environ.get("RUN_DATA", ".")) / data
        if (folder / "train").is_dir() and (folder / "val").is_dir():
            train, val = Shards(folder / "train"), Shards(folder / "val")
            return (train, range(len(train))), (val, range(len(val)))
        source = Shards(folder)
    # Without a validation set, one image in ten is never trained on. A random choice: the order may follow the classes.
    numbers = random.Random(0).sample(range(len(source)), len(source))
    return (source, sorted(numbers[len(source) // 10 :])), (source, sorted(numbers[: len(source) // 10]))
