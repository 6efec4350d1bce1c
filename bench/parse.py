"""Numbers, lists, quantities and transports as users write them on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from cluster.core.errors import UserError, bounded
from cluster.core.numbers import LARGEST, MOST, POSITIVE, SMALLEST

PLOT_SUFFIXES = (".html", ".json", ".pdf", ".png", ".svg")
PLOT_FORMATS = f"the suffix is the format: {', '.join(PLOT_SUFFIXES)}"
TRANSPORTS = ("tcp", "verbs", "efa")
# Names that earlier versions or people use, and that the published tables keep.
OLD_TRANSPORTS = {"rdma": "verbs", "roce": "verbs", "ib": "verbs", "infiniband": "verbs"}


def number(text: str, flag: str) -> float:
    """A number above zero."""
    try:
        return POSITIVE(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{flag}: {error}") from None


def positive(value: float, flag: str) -> float:
    return number(str(value), flag)


def numbers(text: str, flag: str) -> list[float]:
    """A list of numbers above zero, such as 1,2.5,10."""
    return [number(word, flag) for word in text.split(",")]


def counts(text: str, flag: str) -> list[int]:
    """A list of whole numbers above zero, each once."""
    values = list(dict.fromkeys(numbers(text, flag)))
    for value in values:
        if value != int(value):
            raise UserError(f"{flag}: {value:g} must be a whole number")
        if value > MOST:
            raise UserError(f"{flag}: {value:g} is too large; the limit is {MOST}")
    return [int(value) for value in values]


def share(text: str, flag: str) -> float:
    """A number above 0 and at most 1."""
    value = number(text, flag)
    if value > 1:
        raise UserError(f"{flag}: {value:g} must be at most 1")
    return value


def named_path(text: str) -> Path:
    """For type= of an option: a path. An empty one would mean the working folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("empty; give the path of a file or folder")
    return Path(text)


def plot_path(text: str) -> Path:
    """For type= of an option: the file of a plot."""
    path = named_path(text)
    if path.suffix not in PLOT_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{bounded(text, 60)} must end in one of {', '.join(PLOT_SUFFIXES)}")
    return path


def quantity(text: str, units: Iterable[str]) -> tuple[float, str] | None:
    """A number above zero with an optional unit, such as 200MB/s; None where text is something else."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ/ ")
    unit = text[len(digits) :].strip()
    try:
        value = float(digits)
    except ValueError:
        return None
    return (value, unit) if SMALLEST <= value <= LARGEST and (not unit or unit.lower() in units) else None


def transport(text: str, flag: str = "--transport") -> str:
    """tcp, verbs or efa. An old name is accepted, with a hint on standard error."""
    if text in OLD_TRANSPORTS:
        now = "now " if text == "rdma" else ""
        print(f"bench: {flag}: {text} is {now}called {OLD_TRANSPORTS[text]}", file=sys.stderr)
        return OLD_TRANSPORTS[text]
    if text not in TRANSPORTS:
        raise UserError(f"{flag}: {bounded(text, 60)!r} is not known, use one of {', '.join(TRANSPORTS)}")
    return text
