"""A model of the user: the file that `bench predict --torch` writes, and every command that takes it.

Reading a torch module needs torch: roles/horovod/molecule/default/tests/test_at_home.py does that on a node.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.catalogue import models
from bench.cli import main
from bench.plan import unfold
from bench.plan.check import check
from bench.plan.schema import Plan
from bench.sweep import spec
from cluster.core.errors import UserError

HEAD = "layer,shapes,macs,activations\n"
RATE = ["--single-rate", "100", "--gpus", "16", "--gpus-per-node", "4", "--rate-gbps", "10"]


def as_file(model: models.Model) -> str:
    """The table of a known network."""
    kind = (
        f"sequences,{model.tokens},,\n" if model.tokens else f"images,3x{model.input_pixels}x{model.input_pixels},,\n"
    )
    lines = []
    for layer in model.layers:
        shapes = " ".join("x".join(map(str, shape)) for shape in layer.shapes)
        lines.append(f"{layer.name},{shapes},{layer.macs},1000\n")
    return HEAD + kind + "".join(lines)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["resnet50", "gpt2"])
def test_the_same_layers_in_a_file_give_the_same_prediction(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(as_file(models.get(name)))
    known, own = (answer(capsys, "predict", *how, *RATE) for how in (["--model", name], ["--model-file", str(file)]))
    assert own["images_per_second"] == known["images_per_second"]
    assert (own["low"], own["high"]) == (known["low"], known["high"])
    assert models.get(str(file)).unit == models.get(name).unit
    (row,) = answer(
        *(capsys, "plan", "network", "--model-file", str(file), "--single-rate", "100"),
        *("--nodes", "4", "--gpus-per-node", "4", "--networks", "10g"),
    )
    assert row["images_per_second"] == pytest.approx(own["images_per_second"], rel=1e-5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "missing"),
        ("a,b\n", "the first line must be layer,shapes,macs,activations"),
        (HEAD, "no layer has parameters"),
        (HEAD + "words,8,,\n", "line 2: 'words' must be images or sequences"),
        (HEAD + "images,3x8x8,,\nfc,10\n", "line 3: 2 values, it needs 4"),
        (HEAD + "images,3x8x8,,\nfc,10x0,1,1\n", "line 3: shapes: '0' must be a whole number"),
        (HEAD + "images,3x8x8,,\nfc,10x8,many,1\n", "line 3: macs: 'many' must be a whole number"),
        (HEAD + "images,3x8x8,,\nfc,10x8,0,1\n", "no layer has macs"),
    ],
)
def test_a_bad_file_is_one_line(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.csv"
    if text is not None:
        file.write_text(text)
    assert main(["predict", "--model-file", str(file), *RATE]) == 2
    error = capsys.readouterr().err
    assert told in error and error.startswith("bench: --model-file: ") and error.count("\n") == 1


def test_an_own_model_needs_a_measured_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(as_file(models.get("resnet50")))
    for gpu in ([], ["--gpu", "v100"]):
        assert main(["predict", "--model-file", str(file), *gpu, *RATE[2:]]) == 2
        assert "measure one GPU" in capsys.readouterr().err


def test_a_sweep_emulates_an_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text(as_file(models.get("alexnet")))
    given = {"nodes": [2], "batches": [8], "fabrics": ["10g"], "models": ["mine.csv"], "compute_ms": {"mine.csv": 20}}
    plan = Plan.model_validate(given)
    check(plan, None, 2)
    (group,) = unfold.points(plan, None)
    sent = spec.gradients(plan, [group.points[0].model])["mine.csv"]
    assert sum(gradient.elements for gradient in sent) == models.get("alexnet").parameters
    assert unfold.compute_ms(plan, group.points[0])[0] == 20
    for change, told in (
        ({"compute_ms": None}, r"plan\.compute_ms: mine\.csv has no published rate"),
        ({"device": "cuda"}, r"set device: emulated"),
        ({"models": ["there/mine.csv"]}, r"without its folder"),
    ):
        with pytest.raises(UserError, match=told):
            check(Plan.model_validate(given | change), None, 2)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough to pass the check that torch is there."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("train", "is not package.module:factory"),
        ("no_such_module:make", "cannot import no_such_module: No module named 'no_such_module'"),
        ("broken:make", "cannot import broken: out of luck"),
        ("json:no_such_function", "json has no function no_such_function"),
    ],
)
def test_a_factory_that_cannot_be_used_is_one_line(
    factory: str, told: str, torch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("broken.py").write_text("raise RuntimeError('out of luck')\n")
    assert main(["predict", "--torch", factory, "--model-file", "mine.csv"]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert not Path("mine.csv").exists()


def test_torch_is_needed_and_a_file_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--torch", "train:make", "--model-file", "mine.csv"]) == 2
    assert "torch is not installed here; run the command in a venv with torch or on the head" in capsys.readouterr().err
    assert main(["predict", "--torch", "train:make"]) == 2
    assert "--model-file: missing" in capsys.readouterr().err
