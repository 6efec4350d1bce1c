"""bench data make, shard, verify and bench, as a user calls them."""

from __future__ import annotations

import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy
import pytest
import simplejpeg
from data_cases import jpeg, make, pillow_pipeline, served
from PIL import Image
from report_cases import copy

from bench.cli import main
from bench.data import standin
from bench.results.runs import load
from bench.worker import images, shards, stages

pytestmark = pytest.mark.timeout(120)


def tree(folder: Path) -> Path:
    """A folder like ImageNet's, with one file that is not a JPEG and one that is truncated."""
    number = 0
    for split, each in (("train", 6), ("val", 2)):
        for wnid in ("n01440764", "n01443537", "n01484850"):
            place = folder / split / wnid
            place.mkdir(parents=True)
            for image in range(each):
                (place / f"{wnid}_{image}.JPEG").write_bytes(jpeg(number))
                number += 1
    (folder / "train/n01440764/n01440764_90.JPEG").write_bytes(b"\x89PNG not a JPEG")
    (folder / "train/n01443537/n01443537_91.JPEG").write_bytes(jpeg(1)[:-40])
    return folder


def test_stand_in_has_imagenets_shape():
    made = [standin.image(1, number) for number in range(60)]
    sizes = [images.size_of(one) for one in made]
    assert 90_000 < numpy.mean([len(one) for one in made]) < 130_000
    assert sizes.count((500, 375)) > 20
    assert len({standin.label(1, number) for number in range(2000)}) > 800


def test_classes_of_the_stand_in_can_be_told_apart():
    """By the nearest mean colour, on images that the means were not computed from: far above chance."""
    labels = numpy.array([standin.label(1, number, 10) for number in range(160)])
    colours = numpy.array([numpy.median(decoded(standin.image(1, number, 10)), (0, 1)) for number in range(160)])
    means = numpy.array([colours[:120][labels[:120] == label].mean(0) for label in range(10)])
    found = numpy.linalg.norm(colours[120:, None] - means, axis=2).argmin(1)
    assert (found == labels[120:]).mean() > 0.5


def decoded(data: bytes) -> numpy.ndarray:
    return numpy.asarray(Image.open(io.BytesIO(data)))


def test_make_keeps_no_shards_of_older_images(tmp_path, monkeypatch, capsys):
    options = ["data", "make", "--images", "2", "--out", str(tmp_path / "a")]
    assert main(options) == 0
    monkeypatch.setattr(standin, "VERSION", standin.VERSION + 1)
    assert main(options) == 2
    assert "another data set" in capsys.readouterr().err


def test_make_depends_on_the_seed_alone(tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        options = ["--images", "7", "--seed", seed, "--shard-mb", "0.4", "--out", str(tmp_path / name)]
        assert main(["data", "make", *options]) == 0
    digests = [[one.sha256 for one in shards.load_index(str(tmp_path / name)).shards] for name in "abc"]
    assert len(digests[0]) == 2
    assert digests[0] == digests[1] != digests[2]
    assert "synthetic" in json.loads((tmp_path / "a/index.json").read_text())["kind"]


def test_make_again_keeps_finished_shards(tmp_path, capsys):
    command = ["data", "make", "--images", "7", "--shard-mb", "0.4", "--out", str(tmp_path)]
    main(command)
    names = sorted(tmp_path.glob("*.tar"))
    before = [path.stat().st_mtime_ns for path in names]
    names[1].unlink()
    assert main(command) == 0
    assert names[0].stat().st_mtime_ns == before[0]
    assert names[1].stat().st_mtime_ns != before[1]
    assert main(["data", "verify", str(tmp_path)]) == 0
    assert "no problems" in capsys.readouterr().out


def test_killed_make_goes_on(tmp_path):
    command = [sys.executable, "-m", "bench.cli", "data", "make", "--images", "120", "--shard-mb", "1"]
    process = subprocess.Popen([*command, "--out", str(tmp_path / "set")])
    while not list(tmp_path.glob("set/*1.tar")):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    process.wait()
    with pytest.raises(shards.DataError, match="not finished"):
        shards.load_index(str(tmp_path / "set"))
    index = json.loads((tmp_path / "set/index.json").read_text())
    paths = [tmp_path / "set" / one["name"] for one in index["shards"]]
    kept = {path: path.stat().st_mtime_ns for path in paths}
    assert kept
    assert main(["data", *command[4:], "--out", str(tmp_path / "set")]) == 0
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    assert not list((tmp_path / "set").glob("*.part"))


def test_another_set_in_the_folder_is_refused(tmp_path, capsys):
    main(["data", "make", "--images", "2", "--out", str(tmp_path)])
    assert main(["data", "make", "--images", "3", "--out", str(tmp_path)]) == 2
    assert "has another data set" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--images", "0"], ["--images", "3", "--shard-mb", "-1"]])
def test_make_names_what_is_wrong(tmp_path, capsys, words):
    assert main(["data", "make", "--out", str(tmp_path / "x"), *words]) == 2
    assert "is not possible; give a" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_shard_takes_a_tree_and_names_bad_images(tmp_path, capsys):
    source = tree(tmp_path / "tree")
    command = ["data", "shard", "--imagenet", str(source), "--out", str(tmp_path / "out"), "--shard-mb", "0.01"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "skipped train/n01440764/n01440764_90.JPEG" in said
    assert "skipped train/n01443537/n01443537_91.JPEG: the end of the image is missing" in said
    assert "2 bad images were skipped" in said
    train, val = (shards.load_index(str(tmp_path / "out" / split)) for split in ("train", "val"))
    assert (train.samples, val.samples, train.classes) == (18, 6, 3)
    assert len(train.shards) > 2
    labels = {}
    for shard in train.shards:
        with tarfile.open(tmp_path / "out/train" / shard.name) as tar:
            labels |= {m.name: tar.extractfile(m).read() for m in tar if m.name.endswith(".cls")}
    assert labels["n01484850_3.cls"] == b"2"
    assert main(["data", "verify", str(tmp_path / "out/train")]) == 0
    assert main(command) == 0


def test_flat_val_needs_labels(tmp_path, capsys):
    source = tree(tmp_path / "tree")
    shutil.rmtree(source / "val")
    (source / "val").mkdir()
    (source / "val/ILSVRC2012_val_00000001.JPEG").write_bytes(jpeg(1))
    command = ["data", "shard", "--imagenet", str(source), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "--val-labels" in capsys.readouterr().err
    (tmp_path / "labels.csv").write_text("ImageId,x\nILSVRC2012_val_00000001,n01443537 1 2 3 4\n")
    assert main([*command, "--val-labels", str(tmp_path / "labels.csv")]) == 0
    assert shards.load_index(str(tmp_path / "out/val")).samples == 1


def test_two_images_with_one_key_are_refused(tmp_path, capsys):
    source = tree(tmp_path / "tree")
    (source / "train/n01440764/n01440764_1.jpg").write_bytes(jpeg(5))
    assert main(["data", "shard", "--imagenet", str(source), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "n01440764_1.JPEG" in said
    assert "n01440764_1.jpg" in said
    assert not list((tmp_path / "out").glob("**/*.tar"))


def test_verify_names_every_damage(tmp_path, capsys):
    index = make(tmp_path, [4, 4, 4, 4])
    first, second, third, _ = (tmp_path / shard.name for shard in index.shards)
    offsets = shards.load_offsets(index, index.shards[0])
    with first.open("r+b") as file:
        file.seek(offsets.spans[1][1])
        file.write(b"xxxx")
    with second.open("r+b") as file:
        file.truncate(second.stat().st_size - 512)
    third.unlink()
    assert main(["data", "verify", str(tmp_path), "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert any(text.startswith("t-000.tar: sha256 differs") for text in problems)
    assert any(text.startswith("t-000.tar: s00001: not an image") for text in problems)
    assert any(text.startswith("t-001.tar:") and "bytes, index.json has" in text for text in problems)
    assert "t-002.tar: missing" in problems


def test_bench_measures_every_stage_of_every_backend(tmp_path, capsys):
    main(["data", "make", "--images", "24", "--out", str(tmp_path)])
    capsys.readouterr()
    with served(tmp_path) as (url, _):
        command = ["data", "bench", str(tmp_path), url, "--seconds", "0.05", "--cores", "1", "--rate", "3000", "--json"]
        assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    names = [one["stage"] for one in answer["storage"][url]["stages"] + answer["core"]]
    assert names == ["raw read", "read + tar parse", "decode", "augment", "batch (decode + augment)", "host to device"]
    assert all(one["images_per_second"] > 0 for one in answer["core"])
    per_core = answer["need"]["images_per_second_per_core"]
    assert answer["need"]["cores"] == -(-3000 // per_core)
    assert set(answer["need"]["drives"]) == {str(tmp_path), url}
    assert answer["storage"][url]["pipeline"]["images_per_second"] > 0


def test_stages_prints_json_on_a_node(tmp_path, capsys):
    index = make(tmp_path, [6])
    assert stages.main(["1", "0.01", str(tmp_path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer["storage"]) == [str(tmp_path)]
    assert answer["cores"] == 1
    (tmp_path / index.shards[0].name).unlink()
    assert stages.main(["1", "0.01", str(tmp_path)]) == 2
    assert "t-000.tar: No such file" in capsys.readouterr().err


def smooth_jpeg() -> bytes:
    gradient = numpy.linspace(0, 255, 500 * 375).reshape(375, 500)
    picture = numpy.stack([gradient, gradient[::-1], gradient[:, ::-1]], axis=-1).astype(numpy.uint8)
    return simplejpeg.encode_jpeg(picture, quality=95)


@pytest.mark.parametrize(("data", "tolerance"), [(smooth_jpeg(), 1.5), (standin.image(1, 0), 10)])
def test_augment_agrees_with_pillow(data, tolerance):
    """The same crop and flip: mean absolute difference in levels of 255. A wrong flip of the noisy one gives 40."""
    planes = numpy.zeros((3, 224, 224), numpy.float32)
    scale = 255 * numpy.array(images.DEVIATION)[:, None, None]
    for seed in range(20):
        images.normalise(images.augment(data, random.Random(seed)), planes)
        expected = pillow_pipeline(data, random.Random(seed))
        assert (numpy.abs(planes - expected) * scale).mean() < tolerance


@pytest.mark.parametrize("flip", [False, True])
def test_enlarging_agrees_with_pillow_within_a_level(flip):
    """Both are plain bilinear when nothing shrinks. The image is a view of a larger one, as a crop is."""
    whole = numpy.random.default_rng(1).integers(0, 256, (200, 300, 4), numpy.uint8)
    image = images.crop(whole, (40, 30, 170, 110), (300, 200))
    assert image.shape == (110, 170, 4)
    expected = numpy.array(Image.fromarray(image[..., :3].copy()).resize((224, 224), Image.Resampling.BILINEAR))
    out = numpy.zeros((224, 224, 4), numpy.uint8)
    assert images.resize(image, 224, flip, out) is out
    found = out[:, ::-1, :3] if flip else out[..., :3]
    assert numpy.abs(found.astype(int) - expected).mean() < 1


@pytest.mark.parametrize("box", [(0, 0, 1, 1), (1599, 1199, 1, 1), (0, 1199, 1600, 1), (3, 5, 1597, 1195)])
def test_crop_of_a_smaller_scale_is_never_empty(box):
    found = images.crop(numpy.zeros((150, 200, 4), numpy.uint8), box, (1600, 1200))
    assert min(found.shape) > 0
    assert images.resize(found, 16, False).shape == (16, 16, 4)


def test_crop_is_decoded_at_a_smaller_scale_only_when_it_keeps_its_pixels():
    data = simplejpeg.encode_jpeg(numpy.zeros((1200, 1600, 3), numpy.uint8))
    assert images.decode(data, (0, 0, 1600, 1200), (1600, 1200), 224).shape[:2] == (300, 400)
    assert images.decode(data, (0, 0, 300, 300), (1600, 1200), 224).shape[:2] == (1200, 1600)


def test_measured_capacities_reach_explain(tmp_path, capsys):
    main(["data", "make", "--images", "24", "--out", str(tmp_path / "set")])
    run = copy("data-hdd", tmp_path)
    command = ["data", "bench", str(tmp_path / "set"), "--seconds", "0.05", "--cores", "1", "--rate", "100"]
    assert main([*command, "--run", str(run)]) == 0
    capsys.readouterr()
    assert main(["explain", str(run), "--json"]) == 0
    path = {stage["stage"]: stage for stage in json.loads(capsys.readouterr().out)["path"]}
    assert path["storage"]["source"] == path["decode"]["source"] == "measured"
    capacities = json.loads((run / "capacities.json").read_text())
    assert path["decode"]["images_per_second"] == pytest.approx(
        capacities["decode"]["value"] * load(run).table().points[-1].nodes, rel=0.01
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "/nowhere"], "/nowhere/index.json"),
        (["bench", "/nowhere", "--cores", "-1"], "--cores"),
        (["bench", "/nowhere", "--env", "local", "--rate", "0"], "--rate"),
        (["push", "/nowhere", "--name", "../x"], "--name"),
        (["push", "/nowhere"], "/nowhere/index.json"),
        (["verify", "/nowhere"], "/nowhere/index.json"),
        (["shard", "--imagenet", "/nowhere", "--out", "/nowhere"], "--imagenet"),
    ],
)
def test_bad_input_is_one_line(capsys, words, said):
    assert main(["data", *words]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1
