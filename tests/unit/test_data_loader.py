"""The loader: all samples, the same each time, nothing lost on resume, bounded memory, and no hang when data is bad."""

from __future__ import annotations

import io
import tarfile
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy
import pytest
import webdataset
from data_cases import CLASSES, jpeg, make, served

from bench.worker import images, shards, streams
from bench.worker.loader import Loader
from bench.worker.shards import DataError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Give up after a second instead of a minute."""
    monkeypatch.setattr(streams, "ATTEMPTS", 4)
    monkeypatch.setattr(streams, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(streams, "TIMEOUT", 2.0)


@pytest.fixture
def loaders():
    made: list[Loader] = []

    def start(index, rank=0, ranks=1, batch=4, **more) -> Loader:
        loader = Loader(index, rank, ranks, batch, **{"pixels": 16, "window": 8, "epochs": 1, **more})
        made.append(loader)
        return loader

    yield start
    for loader in made:
        loader.close()
    assert not [thread for loader in made for thread in loader.threads if thread.is_alive()]


def keys(loader: Loader) -> list[str]:
    return [key for batch in loader for key, valid in zip(batch.keys, batch.valid, strict=True) if valid]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_sample_once_per_epoch(tmp_path, loaders, ranks):
    index = make(tmp_path, [9, 4, 12, 7, 5])
    seen = Counter()
    for rank in range(ranks):
        seen.update(keys(loaders(index, rank, ranks, policy="pad", cores=3)))
    assert seen == Counter(f"s{number:05d}" for number in range(37))


def test_labels_belong_to_their_images(tmp_path, loaders):
    index = make(tmp_path, [10, 10])
    for batch in loaders(index):
        for key, label in zip(batch.keys, batch.labels, strict=True):
            assert label == int(key[1:]) % CLASSES


def test_same_seed_same_pixels_whatever_the_threads(tmp_path, loaders):
    index = make(tmp_path, [12, 9])
    first = [batch.pixels.copy() for batch in loaders(index, cores=1)]
    again = [batch.pixels.copy() for batch in loaders(index, cores=4)]
    other = [batch.pixels.copy() for batch in loaders(index, epoch=1)]
    assert all(numpy.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(numpy.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("policy", ["drop", "pad"])
def test_resumed_run_goes_on_where_it_stopped(tmp_path, loaders, policy):
    index = make(tmp_path, [9, 4, 12, 7, 5])
    whole = [list(batch.keys) for batch in loaders(index, 1, 2, batch=3, policy=policy, epochs=2)]
    loader = loaders(index, 1, 2, batch=3, policy=policy, epochs=2)
    for stop in range(1, len(whole)):
        next(loader)
        epoch, start = loader.state
        rest = loaders(index, 1, 2, batch=3, policy=policy, epoch=epoch, start_batch=start, epochs=2 - epoch)
        assert [list(batch.keys) for batch in rest] == whole[stop:]


def test_too_few_samples_is_said(tmp_path):
    index = make(tmp_path, [3])
    with pytest.raises(DataError, match="3 samples are too few for 2 ranks"):
        Loader(index, 0, 2, 4)


def test_floats_are_normalised(tmp_path, loaders):
    index = make(tmp_path, [8])
    plain = next(loaders(index)).pixels[..., :3].astype(numpy.float64) / 255
    expected = (plain - images.MEAN) / images.DEVIATION
    floats = next(loaders(index, floats=True)).pixels
    assert floats.shape == (4, 3, 16, 16)
    assert numpy.allclose(floats.transpose(0, 2, 3, 1), expected, atol=1e-5)


def test_used_samples_are_read_again_only_on_request(tmp_path, loaders):
    index = make(tmp_path, [8, 8])
    loader = loaders(index, repeat=3)
    assert Counter(keys(loader)) == Counter({f"s{number:05d}": 3 for number in range(16)})
    assert loader.meter.read_bytes < index.bytes


def test_webdataset_and_tar_read_the_shards(tmp_path):
    index = make(tmp_path, [5, 3])
    paths = [str(tmp_path / shard.name) for shard in index.shards]
    found = {sample["__key__"]: sample for sample in webdataset.WebDataset(paths, shardshuffle=False).decode("rgb8")}
    assert sorted(found) == [f"s{number:05d}" for number in range(8)]
    assert found["s00003"]["cls"] == 3
    assert found["s00003"]["jpg"].shape == (24, 24, 3)
    with tarfile.open(paths[0]) as tar:
        assert tar.extractfile("s00002.jpg").read() == jpeg(2)


def test_shards_of_another_layout_are_read(tmp_path, loaders):
    """Labels first and other members in between, as other programs write them."""
    index = make(tmp_path, [6])
    lines = ["v1.2 6"]
    with tarfile.open(tmp_path / "t-000.tar", "w") as tar:
        for number in range(6):
            words = []
            parts = {"cls": str(number).encode(), "json": b"{}", "jpg": jpeg(number)}
            for kind, data in parts.items():
                info = tarfile.TarInfo(f"s{number:05d}.{kind}")
                info.size = len(data)
                words.append(f"{kind} {tar.offset + 512} {len(data)} {info.name}")
                tar.addfile(info, io.BytesIO(data))
            lines.append(" ".join(words))
    (tmp_path / "t-000.idx").write_text("\n".join(lines))
    loader = loaders(index, batch=3)
    assert sorted(keys(loader)) == [f"s{number:05d}" for number in range(6)]
    assert not loader.faults.counts


# Damages of a data set, and how they are reported.


def damage_header(folder: Path, index: shards.Index) -> None:
    offsets = shards.load_offsets(index, index.shards[0])
    with (folder / index.shards[0].name).open("r+b") as file:
        file.seek(offsets.starts[3])
        file.write(b"\xff" * 512)


def truncate(folder: Path, index: shards.Index) -> None:
    offsets = shards.load_offsets(index, index.shards[0])
    with (folder / index.shards[0].name).open("r+b") as file:
        file.truncate(offsets.starts[3] + 700)


def overwrite_image(folder: Path, index: shards.Index) -> None:
    offsets = shards.load_offsets(index, index.shards[0])
    with (folder / index.shards[0].name).open("r+b") as file:
        _, begin, end, *_ = offsets.spans[3]
        file.seek(begin)
        file.write(bytes(end - begin))


def rename_label(folder: Path, index: shards.Index) -> None:
    offsets = shards.load_offsets(index, index.shards[0])
    with (folder / index.shards[0].name).open("r+b") as file:
        file.seek(offsets.spans[3][3] - 512)
        file.write(b"other.cls\0")


def spoil_label(folder: Path, index: shards.Index) -> None:
    offsets = shards.load_offsets(index, index.shards[0])
    with (folder / index.shards[0].name).open("r+b") as file:
        file.seek(offsets.spans[3][3])
        file.write(b"x")


def remove_shard(folder: Path, index: shards.Index) -> None:
    (folder / index.shards[0].name).unlink()


def remove_idx(folder: Path, index: shards.Index) -> None:
    (folder / index.shards[0].name).with_suffix(".idx").unlink()


DAMAGES = [
    (damage_header, "tar header is damaged", 1),
    (truncate, "shard is truncated", 6),
    (overwrite_image, "not an image", 1),
    (rename_label, "label is missing", 1),
    (spoil_label, "label is not a number", 1),
    (remove_idx, "index of a shard is missing", 9),
    (remove_shard, "shard not readable (No such file or directory)", 9),
]


@pytest.mark.parametrize(("damage", "kind", "lost"), DAMAGES)
def test_damage_is_skipped_counted_and_named(tmp_path, loaders, damage, kind, lost):
    index = make(tmp_path, [9, 9])
    damage(tmp_path, index)
    loader = loaders(index, batch=6)
    found = keys(loader)
    assert len(found) == len(set(found)) == 18 - lost
    assert loader.faults.counts == {kind: lost}
    assert any(name in loader.faults.examples[0] for name in ("t-000.tar", "t-000.idx", "s00003"))


@pytest.mark.parametrize(("damage", "kind", "lost"), DAMAGES)
def test_strict_stops_at_damage(tmp_path, loaders, damage, kind, lost):
    index = make(tmp_path, [9, 9])
    damage(tmp_path, index)
    with pytest.raises(DataError) as found:
        keys(loaders(index, batch=6, strict=True))
    assert kind in str(found.value)


def test_read_error_names_the_shard(tmp_path, loaders):
    index = make(tmp_path, [9])
    remove_shard(tmp_path, index)
    (tmp_path / index.shards[0].name).mkdir()
    with pytest.raises(DataError, match=r"t-000\.tar: Is a directory"):
        keys(loaders(index))


def test_nothing_readable_is_an_error_not_an_endless_wait(tmp_path, loaders):
    index = make(tmp_path, [9])
    remove_shard(tmp_path, index)
    with pytest.raises(DataError, match="no sample could be read"):
        keys(loaders(index))


def test_large_sample_is_read(tmp_path, loaders):
    noise = simple_large()
    index = make(tmp_path, [5], change=lambda number, data: noise if number == 2 else data)
    assert index.largest > 2 * shards.BLOCK
    loader = loaders(index, batch=5)
    assert len(keys(loader)) == 5
    assert loader.pool.peak_bytes <= loader.bound


def simple_large() -> bytes:
    import simplejpeg

    draw = numpy.random.default_rng(1)
    return simplejpeg.encode_jpeg(draw.integers(0, 256, (1200, 1200, 3), numpy.uint8), quality=95)


# HTTP


def test_http_gives_the_same_as_files(tmp_path, loaders):
    index = make(tmp_path, [9, 4, 12])
    files = [list(batch.keys) for batch in loaders(index, 1, 2)]
    with served(tmp_path) as (url, _):
        assert [list(batch.keys) for batch in loaders(shards.load_index(url), 1, 2)] == files


def test_broken_connections_are_made_again_where_they_broke(tmp_path, loaders):
    make(tmp_path, [9, 4, 12])
    with served(tmp_path, ["cut", "503", None, "cut", "cut"]) as (url, _):
        loader = loaders(shards.load_index(url), strict=True)
        assert len(set(keys(loader))) == 24


def test_refused_request_is_not_retried(tmp_path, loaders):
    make(tmp_path, [9])
    with served(tmp_path, ["403", None]) as (url, handler):
        with pytest.raises(DataError, match=r"t-000\.tar: status 403"):
            keys(loaders(shards.load_index(url)))
        assert handler.trouble == [None]


def test_server_gone_and_back_during_an_epoch(tmp_path, loaders, monkeypatch):
    monkeypatch.setattr(streams, "ATTEMPTS", 12)
    make(tmp_path, [16] * 6)
    with served(tmp_path) as (url, handler):
        loader = loaders(shards.load_index(url), strict=True)
        next(loader)
        handler.gone.set()
        threading.Timer(0.5, handler.gone.clear).start()
        assert len(keys(loader)) == 92


def test_server_gone_for_good_names_the_shard(tmp_path, loaders):
    make(tmp_path, [16] * 6)
    with served(tmp_path) as (url, handler):
        loader = loaders(shards.load_index(url))
        next(loader)
        handler.gone.set()
        with pytest.raises(DataError, match=r"t-00\d\.(tar|idx).*gave up after 4 attempts"):
            keys(loader)


def test_server_that_never_answers_is_given_up(tmp_path, loaders, monkeypatch):
    monkeypatch.setattr(streams, "TIMEOUT", 0.2)
    make(tmp_path, [8])
    with served(tmp_path, ["silent"] * 4) as (url, handler):
        with pytest.raises(DataError, match=r"t-000\.tar: timed out; gave up after 4 attempts"):
            next(loaders(shards.load_index(url)))
        handler.gone.set()


def test_missing_index_and_wrong_index_are_said(tmp_path):
    with pytest.raises(DataError, match=r"index\.json: No such file"):
        shards.load_index(str(tmp_path))
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(DataError, match="not an index of shards"):
        shards.load_index(str(tmp_path))


# Memory


def test_memory_does_not_grow_with_the_shard(tmp_path, loaders):
    most = []
    for size in (64, 640):
        folder = tmp_path / str(size)
        index = make(folder, [size])
        loader = loaders(index, window=16, batch=4)
        assert len(keys(loader)) == size
        assert loader.pool.peak_bytes <= loader.bound
        most.append(loader.pool.peak_bytes)
    assert most[1] <= most[0] + shards.BLOCK


def test_no_leak_over_ten_thousand_batches(tmp_path, loaders):
    loader = loaders(make(tmp_path, [16, 16]), batch=1, pixels=8, epochs=None, cores=1)
    for _ in range(1000):
        next(loader)
    tracemalloc.start()
    try:
        for _ in range(500):
            next(loader)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        for _ in range(8000):
            next(loader)
        tracemalloc.start()
        for _ in range(500):
            next(loader)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after < before + 500_000
    assert loader.pool.peak_bytes <= loader.bound


def test_next_batches_are_made_while_the_device_computes(tmp_path, loaders):
    loader = loaders(make(tmp_path, [64]), epochs=None)
    next(loader)
    deadline = time.monotonic() + 20
    while len(loader.ready) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(loader.ready) == 2
