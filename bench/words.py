"""Format numbers and names for people."""

from __future__ import annotations

import re
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import Protocol

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
TRANSPORTS = {"tcp": "TCP", "verbs": "verbs", "efa": "EFA"}


def count(number: int, noun: str) -> str:
    word = NUMBERS[number] if number < len(NUMBERS) else f"{number:,}"
    return f"{word} {noun}" if number == 1 else f"{word} {noun}s"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def significant(value: float, digits: int = 3) -> str:
    """Significant digits without scientific notation: 0.0123, 6.4, 213, 12,300."""
    exact = Decimal(str(value))
    if exact == 0:
        return "0"
    # Round half up, as browsers do, so that the page and its script show the same text.
    last = exact.adjusted() - digits + 1
    rounded = exact.quantize(Decimal(1).scaleb(last), ROUND_HALF_UP)
    return f"{int(rounded):,}" if last >= 0 else f"{rounded:,f}".rstrip("0").rstrip(".")


def tenths(share: float) -> str:
    """A share in per cent with one decimal."""
    return f"{Decimal(100 * share).quantize(Decimal('0.1'), ROUND_HALF_UP)}%"


def gbps(rate: float) -> str:
    return f"{significant(rate, 2) if rate < 100 else significant(rate)} Gbit/s"


class OnFabric(Protocol):
    @property
    def fabric(self) -> str: ...
    @property
    def transport(self) -> str: ...


def fabric(point: OnFabric) -> str:
    return fabric_name(point.fabric, point.transport)


def fabric_name(name: str, transport: str | None) -> str:
    """1G, InfiniBand, net (verbs): the transport decides, whatever the name suggests. None: not known."""
    if transport == "verbs" and name.lower() in ("ib", "infiniband"):
        return "InfiniBand"
    shown = name.upper() if re.fullmatch(r"\d+g", name) else name
    return shown if transport in (None, "tcp") or transport in name.lower() else f"{shown} ({transport})"


def age(earlier: str, later: str) -> str:
    """The time between two moments in ISO format: "3 days before the trial"."""
    try:
        seconds = (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
    except (TypeError, ValueError):
        return f"at {earlier[:40]}"
    units = ((86400, "day"), (3600, "hour"), (60, "minute"))
    size, unit = next((pair for pair in units if abs(seconds) >= pair[0]), units[-1])
    return f"{count(round(abs(seconds) / size), unit)} {'before' if seconds >= 0 else 'after'} the trial"


def brief(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def several(names: list[str], most: int = 3) -> str:
    """a, b and c; long lists end in a count."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
