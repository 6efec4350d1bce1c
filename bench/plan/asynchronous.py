"""The engines that let ranks go on without each other, their settings, and the combinations that cannot work."""

from __future__ import annotations

from bench.plan.schema import Plan
from bench.results.trial import Point
from cluster.core.errors import UserError

ENGINES = ("ps-async", "easgd", "local-sgd", "hogwild")
# They exchange weights after several steps.
PERIODIC = ("easgd", "local-sgd")
# The total over all ranks that the authors of easgd use.
ELASTIC_TOTAL = 0.9


def moving_rate(plan: Plan, point: Point) -> float:
    return plan.moving_rate or min(0.5, ELASTIC_TOTAL / point.gpus)


def check(plan: Plan) -> None:
    if not (engines := [engine for engine in plan.engines if engine in ENGINES]):
        return
    first = engines[0]
    if other := [name for name in plan.compressions if name != "none"]:
        raise UserError(
            f"plan.compressions: engine {first} exchanges weights, which {other[0]} would damage; write none"
        )
    if "hogwild" in engines and (most := max(plan.nodes)) > 1:
        raise UserError(f"plan.engines: hogwild shares the memory of one node, not of {most}; set nodes: [1]")
    if "hogwild" in engines and plan.gpus_per_node == [1]:
        raise UserError("plan.engines: hogwild needs several ranks on its node; set gpus_per_node: 2 or more")
    if plan.moving_rate and "easgd" not in engines:
        raise UserError("plan.moving_rate: only engine easgd has one; remove it")
    if plan.device == "cuda":
        raise UserError(f"plan.engines: {first} does not run on GPUs; remove it, or use emulated:<profile> or cpu")
