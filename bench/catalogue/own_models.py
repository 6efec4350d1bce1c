"""A model of the user, from the CSV that `bench predict --torch` writes (bench/worker/torch_sizes.py)."""

from __future__ import annotations

from pathlib import Path

from bench.catalogue.layers import Layer
from cluster.core.errors import UserError, bounded

COLUMNS = ("layer", "shapes", "macs", "activations")
SUFFIX = ".csv"


def read(name: str) -> tuple[str, tuple[int, ...], tuple[Layer, ...], int]:
    """Images or sequences, the shape of one, the layers, and how many values training keeps of one."""
    # This imports pydantic, which predictions of known models do without.
    from cluster.core import files

    label = f"--model-file: {name}"
    lines = iter(files.table(Path(name), label))
    head = next(lines, [])
    if tuple(head) != COLUMNS:
        raise UserError(f"{label}: the first line must be {','.join(COLUMNS)}; `bench predict --torch` writes it")
    kind, shape = "", ""
    layers: list[Layer] = []
    kept = 0
    for number, line in enumerate(lines, start=2):
        where = f"{label} line {number}"
        if len(line) != len(COLUMNS):
            raise UserError(f"{where}: {len(line)} values, it needs {len(COLUMNS)}")
        if not kind:
            kind, shape = line[:2]
            if kind not in ("images", "sequences"):
                raise UserError(f"{where}: {bounded(kind, 40)!r} must be images or sequences, with the shape of one")
            continue
        shapes = tuple(_shape(text, where) for text in line[1].split())
        layers.append(Layer(line[0], shapes, _whole(line[2], f"{where}: macs")))
        kept += _whole(line[3], f"{where}: activations")
    if not any(layer.shapes for layer in layers):
        raise UserError(f"{label}: no layer has parameters")
    if not any(layer.macs for layer in layers):
        raise UserError(f"{label}: no layer has macs")
    return kind, _shape(shape, f"{label} line 2"), tuple(layers), kept


def _shape(text: str, where: str) -> tuple[int, ...]:
    return tuple(_whole(word, f"{where}: shapes", least=1) for word in text.split("x"))


def _whole(text: str, where: str, least: int = 0) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15 or int(text) < least:
        raise UserError(f"{where}: {bounded(text, 40)!r} must be a whole number of at least {least}")
    return int(text)
