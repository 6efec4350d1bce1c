"""Read text, YAML and JSON that people or tools wrote. A bad file raises UserError that starts with its label.

No other module reads such files: what is wrong with a file is one short line, whatever the file holds.
"""

from __future__ import annotations

import csv
import json
import math
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from cluster.core.errors import InfraError, UserError, bounded, one_line

Model = TypeVar("Model", bound=BaseModel)
Shape = TypeVar("Shape")
LARGEST_TEXT = 256 << 20
# Files that people write. PyYAML reads about 100 KB per second.
LARGEST_YAML = 256 << 10
DEEPEST = 64
# Aliases make a small file large once it is printed: ten lines can stand for a billion values.
MOST_VALUES = 100_000


def text(path: Path, label: str = "", largest: int = LARGEST_TEXT) -> str:
    """The content of a file. The label is its name by default."""
    label = label or path.name
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode) and not path.is_dir():
            raise UserError(f"{label}: not a regular file")
        if facts.st_size > largest:
            raise UserError(
                f"{label}: {facts.st_size / 1e6:.1f} MB; files of more than {largest / 1e6:.1f} MB are not read"
            )
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{label}: missing") from None
    except OSError as error:
        raise UserError(f"{label}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{label}: not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    except ValueError:
        # A NUL in the path.
        raise UserError(f"{label}: not the name of a file") from None


def document(path: Path, label: str = "") -> Any:
    """The content of a YAML file or, if its name ends in .json or .tfstate, of a JSON file."""
    label = label or path.name
    if path.suffix in (".json", ".tfstate"):
        return parse(text(path, label), "JSON", label)
    return parse(text(path, label, LARGEST_YAML), "YAML", label)


def parse(content: str, kind: str, label: str) -> Any:
    """The values of a YAML or JSON text: finite numbers, limited depth and size."""
    try:
        found = _load_yaml(content) if kind == "YAML" else _load_json(content)
        _check(found)
    except RecursionError:
        raise UserError(f"{label}: not {kind}: nested deeper than {DEEPEST} levels") from None
    # YAML raises ValueError for an impossible date.
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{label}: not {kind}: {bounded(str(error), 200)}") from None
    return found


def mapping(path: Path, label: str = "") -> dict[str, Any]:
    """The content of a YAML or JSON file that holds names and values."""
    content = document(path, label)
    if not isinstance(content, dict):
        raise UserError(f"{label or path.name}: not a mapping of names to values, but {type(content).__name__}")
    return content


def table(path: Path, label: str = "") -> list[list[str]]:
    """The lines of a CSV file."""
    label = label or path.name
    try:
        return list(csv.reader(text(path, label).splitlines()))
    except csv.Error as error:
        raise UserError(f"{label}: not CSV: {error}") from None


def record(path: Path, shape: type[Shape], label: str = "") -> Shape:
    """The content of a file that one of our own programs wrote, in the given shape."""
    content = document(path, label)
    try:
        return TypeAdapter(shape).validate_python(content)
    except ValidationError as error:
        raise UserError(f"{label or path.name}: damaged: {one_line(error, 'content')}") from None


def answer(content: str, who: str, shape: type[Shape]) -> Shape:
    """What a tool or a node printed as JSON, in the given shape."""
    try:
        return TypeAdapter(shape).validate_python(parse(content, "JSON", who))
    except UserError:
        raise InfraError(f"{who}: expected JSON, got {bounded(content, 120)!r}") from None
    except ValidationError as error:
        raise InfraError(f"{who}: unexpected answer: {one_line(error, 'answer')}") from None


def validate(model: type[Model], values: object, label: str, prefix: str) -> Model:
    """The values as a model. An error names the file and the field below prefix."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{label}: {one_line(error, prefix)}") from None


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _load_json(content: str) -> Any:
    return json.loads(content, parse_constant=_constant)


class _Loader(yaml.SafeLoader):
    """A key is a name: 10 and no are text. One that occurs twice is refused: the first value would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    place = f"line {key.start_mark.line + 1}"
                    raise ValueError(f"{bounded(key.value, 80)}: given twice, the second time in {place}; remove one")
                seen.add(key.value)
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


def _load_yaml(content: str) -> Any:
    loader = _Loader(content)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _values(node, {}, 0)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _values(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """How many values a node stands for, its aliases resolved."""
    if depth > DEEPEST:
        raise RecursionError
    if id(node) not in known:
        # Until it is counted, meeting it again means that it contains itself.
        known[id(node)] = MOST_VALUES + 1
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        children = [part for item in inner for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_values(child, known, depth + 1) for child in children)
    if known[id(node)] > MOST_VALUES:
        raise ValueError(f"its aliases stand for more than {MOST_VALUES} values; write them out")
    return known[id(node)]


def _check(value: Any, depth: int = 0) -> None:
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, dict):
        for inner in value.values():
            _check(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
