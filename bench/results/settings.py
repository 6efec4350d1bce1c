"""The settings that a trial was measured under, beside its point; and where trials of one run differ in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from bench.results.trial import Settings, Trial


def differences(old: Settings, new: Settings) -> list[str]:
    """One text per setting that differs, such as "tuning.fusion_mb 64 then 128"."""
    before, after = flat(old.model_dump()), flat(new.model_dump())
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name} {shown(before.get(name))} then {shown(after.get(name))}" for name in names]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


def shown(value: Any) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def mixed(trials: Iterable[Trial]) -> list[str]:
    """One line per curve whose trials were measured under different settings."""
    curves: dict[str, list[Settings]] = defaultdict(list)
    for trial in trials:
        if trial.status == "ok" and trial.settings is not None:
            point = trial.point
            curve = f"{point.model}, {point.engine}, {point.compression}, {point.data} on {point.fabric}"
            curves[curve].append(trial.settings)
    out = []
    for curve, found in curves.items():
        other = next((one for one in found if one != found[0]), None)
        if other is not None:
            first = differences(found[0], other)[0]
            out.append(f"trials of {curve} were measured under different settings ({first}); run the sweep again")
    return out
