"""Numbers and records as JSON has them."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any


def as_object(record: Any) -> dict[str, Any]:
    return {name: rounded(value) for name, value in asdict(record).items()}


def rounded(value: Any) -> Any:
    """Six significant digits: enough for any use and stable across machines. JSON has no infinity."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
