"""The examples' data: every image once per epoch, the same batches at every size, the same crop wherever it is used.

What needs torch runs on nodes: tests/e2e/test_run.py, tests/long/test_journey.py.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy
import pytest
from PIL import Image

from bench.cli import main
from bench.data import standin
from bench.worker import shards
from cluster.core.config import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import images as example


@pytest.mark.parametrize("count", [64, 97, 1000])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_image_is_used_once_per_epoch(count: int, size: int) -> None:
    order = example.Order(range(count), 8, 4, 1)
    steps = order.steps_per_epoch
    for epoch in (0, 3):
        parts = [list(order.micro_batches_of(rank, size, epoch * steps, (epoch + 1) * steps)) for rank in range(size)]
        # A collective waits for every process, so all have the same number of micro-batches, and none is empty.
        assert {len(part) for part in parts} == {steps * 4 // size}
        assert all(1 <= len(batch) <= 8 for part in parts for batch in part)
        used = [number for part in parts for batch in part for _, number in batch]
        assert sorted(used) == list(range(count))
        assert used != sorted(used)


def steps_of(order: example.Order, size: int, first: int, last: int) -> list[list[list[tuple[int, int]]]]:
    """Per step its micro-batches over all processes."""
    parts = [iter(list(order.micro_batches_of(rank, size, first, last))) for rank in range(size)]
    return [
        sorted(next(part) for part in parts for _ in range(order.micro_batches // size)) for _ in range(first, last)
    ]


def test_a_step_has_the_same_micro_batches_on_1_2_and_4_processes() -> None:
    order = example.Order(range(203), 8, 4, 1)
    alone = steps_of(order, 1, 0, 20)
    assert alone == steps_of(order, 2, 0, 20) == steps_of(order, 4, 0, 20)
    assert [sum(map(len, step)) for step in alone] == [order.step_size(step) for step in range(20)]
    assert alone != steps_of(example.Order(range(203), 8, 4, 2), 1, 0, 20)


def test_a_run_resumes_at_any_step_on_another_number_of_processes() -> None:
    order = example.Order(range(203), 8, 4, 1)
    assert steps_of(order, 4, 0, 9) + steps_of(order, 2, 9, 20) == steps_of(order, 1, 0, 20)


def test_too_few_images_for_the_micro_batches_are_refused() -> None:
    with pytest.raises(SystemExit, match="3 images do not fill 4 micro-batches"):
        example.Order(range(3), 8, 4, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "standin"
    assert main(["data", "make", "--images", "20", "--classes", "5", "--shard-mb", "1", "--out", str(path)]) == 0
    return path


def test_the_reader_finds_every_image_of_the_shards(folder: Path) -> None:
    source = example.Shards(folder)
    assert len(shards.load_index(str(folder)).shards) > 1
    assert source.classes == 5
    found = [source.read(number) for number in range(len(source))]
    assert [label for _, label in found] == [standin.label(1, number, 5) for number in range(20)]
    assert all(isinstance(picture, Image.Image) and picture.convert("RGB").size for picture, _ in found)


def test_augmentation_follows_from_the_image_and_the_epoch_alone(folder: Path) -> None:
    source = example.Shards(folder)
    pictures = example.Pictures(source, 32, 1)
    first, label = pictures[0, 7]
    assert first.shape == (3, 32, 32) and first.dtype == numpy.uint8
    # Another process, which reads other images before: a copy, as a worker of the DataLoader gets it.
    other = pickle.loads(pickle.dumps(pictures))  # noqa: S301 - made in this test
    assert other[0, 3][0].tolist() != first.tolist()
    assert other[0, 7][0].tolist() == first.tolist() and other[0, 7][1] == label
    assert other[1, 7][0].tolist() != first.tolist()
    # The test crops the middle, the same at any time.
    assert pictures[-1, 7][0].tolist() == example.Pictures(source, 32, 2)[-1, 7][0].tolist()


def test_held_out_images_are_never_trained_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_DATA", str(folder.parent))
    for name, count in (("standin", 20), ("synthetic", 2000)):
        (_, train), (_, test) = example.load(name)
        assert len(test) == count // 10
        assert sorted([*train, *test]) == list(range(count))


def test_a_data_set_with_train_and_val_uses_them(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "both").mkdir()
    for name in ("train", "val"):
        (tmp_path / "both" / name).symlink_to(folder)
    monkeypatch.setenv("RUN_DATA", str(tmp_path))
    (train, numbers), (val, _) = example.load("both")
    assert (train.folder.name, val.folder.name, len(numbers)) == ("train", "val", 20)


def test_a_missing_data_set_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=r"--data: .*/none/index.json: No such file"):
        example.load("none")
