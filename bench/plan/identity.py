"""Which plan a run belongs to: the fields that determine a measurement, completed with their defaults."""

from __future__ import annotations

from typing import Any

from bench.plan.schema import Plan

TEXTS = {"title", "compare"}
# A change here adds points or leaves points out. The points that both plans have are the same.
LISTS = {"nodes", "gpus_per_node", "batches", "fabrics", "models", "engines", "compressions", "data", "repeats"}


def determines(plan: Plan) -> dict[str, Any]:
    """Field -> value of everything that determines how a point is measured."""
    fields = plan.model_dump(exclude={*TEXTS, *LISTS, "links"})
    return fields | {f"links.{name}": link.model_dump() for name, link in plan.links.items()}


def differences(old: Plan, new: Plan) -> list[str]:
    """The fields in which two plans measure differently. A link that only one of them has adds points."""
    before, after = determines(old), determines(new)
    changed = [name for name in before if name in after and before[name] != after[name]]
    return [f"plan.{name} is {before[name]} there and {after[name]} here" for name in changed]
