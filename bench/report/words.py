"""How numbers and names are written for people."""

from __future__ import annotations

import re

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def count(number: int, noun: str) -> str:
    word = NUMBERS[number] if number < len(NUMBERS) else f"{number:,}"
    return f"{word} {noun}" if number == 1 else f"{word} {noun}s"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def significant(value: float, digits: int = 3) -> str:
    """Digits that carry meaning, without scientific notation: 0.0123, 6.4, 213, 12,300."""
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        shift = max(0, len(str(int(abs(value)))) - digits)
        return f"{round(value / 10**shift) * 10**shift:,}"
    return f"{float(f'{value:.{digits}g}'):f}".rstrip("0").rstrip(".")


def gbps(rate: float) -> str:
    return f"{significant(rate, 2) if rate < 100 else significant(rate)} Gbit/s"


def fabric(name: str) -> str:
    if re.fullmatch(r"\d+g", name):
        return name.upper()
    if name.lower() in ("ib", "infiniband"):
        return "InfiniBand"
    return name


def several(names: list[str], most: int = 3) -> str:
    """a, b and c; long lists end in a count."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
