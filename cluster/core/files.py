"""Read text, YAML and JSON files that people or tools wrote. A bad file raises UserError that starts with its label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from cluster.core.errors import UserError, one_line

Model = TypeVar("Model", bound=BaseModel)


def text(path: Path, label: str = "") -> str:
    """The content of a file. The label is its name by default."""
    label = label or path.name
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise UserError(f"{label}: missing") from None
    except OSError as error:
        raise UserError(f"{label}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{label}: not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None


def mapping(path: Path, label: str = "") -> dict[str, Any]:
    """The content of a YAML file or, if its name ends in .json, of a JSON file."""
    label = label or path.name
    kind, parse = ("JSON", json.loads) if path.suffix == ".json" else ("YAML", yaml.safe_load)
    try:
        content = parse(text(path, label))
    # YAML raises ValueError for an impossible date.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{label}: not {kind}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{label}: not a mapping of names to values, but {type(content).__name__}")
    return content


def validate(model: type[Model], values: object, label: str, prefix: str) -> Model:
    """The values as a model. An error names the file and the field below prefix."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{label}: {one_line(error, prefix)}") from None
