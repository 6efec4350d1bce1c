"""The plan of `bench converge`: which trainings, and the factors that give them the time of the named model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from bench.catalogue import gpu_rates, models
from bench.plan.asynchronous import ELASTIC_TOTAL, PERIODIC
from bench.plan.schema import Unique
from cluster.core import files
from cluster.core.contract import Contract
from cluster.core.errors import UserError
from cluster.core.numbers import MOST
from cluster.core.sections import Section

Engine = Literal["horovod", "ddp", "ps", "ps-async", "easgd", "local-sgd"]
# Their ranks have the same weights after every step, so what stands behind an update is the batch of all ranks.
SYNCHRONOUS = ("horovod", "ddp", "ps")
# Milliseconds of this machine to which compute is padded: enough for the small network's own, on shared cores.
PAD_MS, PAD_MS_PER_IMAGE = 20.0, 0.3
Count = Annotated[int, Field(ge=1, le=MOST)]
Batch = Annotated[int, Field(ge=1, le=4096)]


class Plan(Section):
    engines: Annotated[list[Engine], Field(min_length=1), Unique] = Field(
        default=["horovod", "ps-async", "easgd", "local-sgd"],
        description="the first one is what the others are compared with",
    )
    fabrics: Annotated[list[str], Field(min_length=1), Unique] = Field(
        default=["1g", "10g"], description="fabrics of cluster.yml, slowest first"
    )
    nodes: Annotated[list[Count], Field(min_length=1), Unique] = Field(
        default=[4], description="node counts, one rank on each node"
    )
    batch: Batch = Field(default=64, description="images per rank and step")
    large_batches: Annotated[list[Batch], Unique] = Field(
        default=[16, 128], description="further batches for the first engine, on the last fabric and most nodes"
    )
    seeds: Annotated[int, Field(ge=1, le=20)] = Field(default=3, description="trainings of each curve")
    target: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.85, description="accuracy on the held-out images")
    max_samples: Count = Field(default=32_000, description="end of a training that does not reach the target")
    classes: Annotated[int, Field(ge=2, le=200)] = Field(default=10, description="classes of the stand-in images")
    images: Annotated[int, Field(ge=256, le=100_000)] = Field(default=8192, description="images to train on")
    model: str = Field(default="resnet50", description="model whose compute time and gradients are emulated")
    device: Annotated[str, AfterValidator(lambda text: text)] = Field(
        default="emulated:p100", description="emulated:<profile>: accelerator whose compute time is emulated"
    )
    learning_rate: Annotated[float, Field(gt=0, le=10, strict=False)] = Field(
        default=0.015, description="learning rate of an update by reference_batch images"
    )
    reference_batch: Count = Field(default=64, description="images behind an update with this learning rate")
    scaling: Literal["linear", "sqrt", "none"] = Field(
        default="sqrt", description="how the learning rate grows with the images behind an update"
    )
    warmup_samples: Annotated[int, Field(ge=0, le=MOST)] = Field(
        default=4096, description="the learning rate rises from 0 during so many images"
    )
    period: Annotated[int, Field(ge=1, le=1000)] = Field(default=4, description="easgd, local-sgd: steps per exchange")
    moving_rate: Annotated[float, Field(gt=0, le=1, strict=False)] | None = Field(
        default=None, description="easgd (default: 0.9 / ranks)"
    )


@dataclass(frozen=True)
class Curve:
    """The trainings of all seeds under the same conditions."""

    engine: str
    fabric: str
    rate_gbps: float
    nodes: int
    batch: int

    @property
    def id(self) -> str:
        return f"{self.engine}-{self.fabric}-{self.nodes}-{self.batch}"


def load(path: Path | None) -> Plan:
    return files.validate(Plan, files.mapping(path), path.name, "plan") if path else Plan()


def check(plan: Plan, contract: Contract) -> None:
    models.get(plan.model)
    kind, _, profile = plan.device.partition(":")
    if kind != "emulated":
        raise UserError(f"plan.device: {plan.device} is not emulated; write emulated:p100 or another profile")
    gpu_rates.get(profile)
    for batch in (plan.batch, *plan.large_batches):
        gpu_rates.compute_ms(profile, plan.model, batch)
    for fabric in plan.fabrics:
        if fabric not in contract.fabrics:
            raise UserError(f"plan.fabrics: unknown fabric {fabric!r}; choose from {', '.join(contract.fabrics)}")
    if not contract.fabrics[contract.active_fabric].shaped:
        raise UserError("plan.fabrics: the active fabric is not shaped and cannot be slowed; use local nodes")
    if (most := max(plan.nodes)) > len(contract.compute):
        raise UserError(f"plan.nodes: {most} nodes requested, the cluster has {len(contract.compute)}; list fewer")
    if plan.moving_rate and "easgd" not in plan.engines:
        raise UserError("plan.moving_rate: only engine easgd has one; remove it")
    if plan.large_batches and plan.engines[0] not in SYNCHRONOUS:
        raise UserError(f"plan.large_batches: {plan.engines[0]} is not synchronous; put horovod first, or write []")
    if plan.batch in plan.large_batches:
        raise UserError(f"plan.large_batches: {plan.batch} is plan.batch; remove it")


def curves(plan: Plan, contract: Contract) -> Iterator[Curve]:
    rates = {name: contract.fabrics[name].rate_gbps for name in plan.fabrics}
    for engine in plan.engines:
        for nodes in plan.nodes:
            for fabric in plan.fabrics:
                yield Curve(engine, fabric, rates[fabric], nodes, plan.batch)
            if engine == plan.engines[0] and nodes == max(plan.nodes):
                for batch in plan.large_batches:
                    yield Curve(engine, plan.fabrics[-1], rates[plan.fabrics[-1]], nodes, batch)


def learning_rate(plan: Plan, curve: Curve) -> float:
    """By the images behind an update: local SGD averages the weights of all ranks, so it counts as synchronous.

    The updates of ps-async add up: each has a rank's share of the synchronous rate, so that the same images move the
    weights as far.
    """
    alone = curve.engine == "easgd"
    factor = curve.batch * (1 if alone else curve.nodes) / plan.reference_batch
    rate = plan.learning_rate * {"linear": factor, "sqrt": math.sqrt(factor), "none": 1.0}[plan.scaling]
    return rate / curve.nodes if curve.engine == "ps-async" else rate


def compute_ms(plan: Plan, batch: int) -> float:
    return gpu_rates.compute_ms(plan.device.partition(":")[2], plan.model, batch)[0]


def speed(plan: Plan, batch: int) -> float:
    """Emulated seconds per second of this machine."""
    return compute_ms(plan, batch) / (PAD_MS + PAD_MS_PER_IMAGE * batch)


def period(plan: Plan, engine: str) -> int:
    return plan.period if engine in PERIODIC else 1


def moving_rate(plan: Plan, nodes: int) -> float:
    return plan.moving_rate or min(0.5, ELASTIC_TOTAL / nodes)


def evaluate(plan: Plan, curve: Curve) -> int:
    """Steps between two measurements of the accuracy: about every 1,024 images, after an exchange."""
    every = max(1, round(1024 / (curve.batch * curve.nodes)))
    length = period(plan, curve.engine)
    return math.ceil(every / length) * length
