"""Run the trainings of a plan on the nodes, one launch per engine and number of nodes."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from bench.catalogue import models
from bench.comm.measure import Communication
from bench.converge import dataset
from bench.converge import plan as plans
from bench.converge.plan import Curve, Plan
from bench.plan import unfold
from bench.predict.inputs import Setup
from bench.predict.step import step_ms
from bench.results.trial import Point
from bench.sweep import transport
from bench.worker.protocol import Gradient, LaunchSpec, LearnDone, LearnSpec, Spec
from cluster.core import worker_files
from cluster.core.contract import Contract
from cluster.core.progress import Progress
from cluster.tuning import Tuning

START_SECONDS, RUN_SECONDS = 180, 120
TEST_IMAGES = 1024
# Parameters of bench/worker/small_network.py before its last layer, and per class in it.
BEFORE, PER_CLASS = 1_216 + 4_640 + 65_664, 129


@dataclass(frozen=True)
class Sender:
    """What sends the bytes of a curve: the engine that `horovod` stands for on this fabric, and its settings."""

    engine: str
    settings: Tuning


def small_bytes(plan: Plan) -> int:
    """Bytes of the small network's gradients."""
    return 4 * (BEFORE + PER_CLASS * plan.classes)


def scale(plan: Plan) -> float:
    return models.get(plan.model).gradient_bytes / small_bytes(plan)


def spec_of(plan: Plan, curve: Curve, seed: int) -> LearnSpec:
    faster = plans.speed(plan, curve.batch)
    return LearnSpec(
        id=f"{curve.id}-{seed}",
        seed=seed,
        batch=curve.batch,
        learning_rate=plans.learning_rate(plan, curve),
        warmup_samples=plan.warmup_samples,
        target=plan.target,
        max_samples=plan.max_samples,
        compute_s=plans.compute_ms(plan, curve.batch) / 1000 / faster,
        speed=faster,
        scale=scale(plan),
        evaluate=plans.evaluate(plan, curve),
        period=plans.period(plan, curve.engine),
        moving_rate=plans.moving_rate(plan, curve.nodes),
        rate_mbit=curve.rate_gbps * 1000 / scale(plan) * faster,
    )


def measure(
    plan: Plan, contract: Contract, tuned: dict[str, Tuning], progress: Progress
) -> Iterator[list[dict[str, Any]]]:
    """One row per curve with its trainings, after each launch."""
    images = b""
    curves = list(plans.curves(plan, contract))
    # What cannot be predicted is refused before anything runs.
    predicted = {curve: predicted_step_ms(plan, curve) for curve in curves}
    for (engine, nodes), group in groupby(curves, key=lambda curve: (curve.engine, curve.nodes)):
        members = list(group)
        settings = unfold.tuning_of(contract, members[0].fabric, tuned)
        real = settings.engine if engine == "horovod" else engine
        specs = [spec_of(plan, curve, seed) for curve in members for seed in range(1, plan.seeds + 1)]
        with closing(Communication(contract, contract.active_fabric, nodes, progress)) as nodes_of:
            progress.now("images", f"painting {plan.images} images")
            images = images or dataset.encode(plan.images, TEST_IMAGES, plan.classes)
            progress.now("images", "")
            name = f"specs/{hashlib.sha256(images).hexdigest()[:16]}.npz"
            worker_files.install(contract, nodes_of.names, {name: images})
            nodes_of.executor.specs.add(path := f"{worker_files.ON_NODE}/{name}")
            part = LaunchSpec(real, learns=specs, model=plan.model, data=path, rate_mbit=specs[0].rate_mbit)
            spec = Spec([part], {plan.model: gradients(plan)})
            # Horovod's cycle is not shortened with time: its ranks would negotiate 4,000 times a second.
            launch = replace(nodes_of.launch(real, settings, spec, "learn"), scale=specs[0].scale)
            events = nodes_of.events(launch, START_SECONDS + RUN_SECONDS * len(specs))
        done = {event.id: event for event in events if isinstance(event, LearnDone)}
        sender = Sender(real, settings)
        yield [row(plan, contract, curve, sender, done) | {"predicted_step_ms": predicted[curve]} for curve in members]


def gradients(plan: Plan) -> list[Gradient]:
    return [Gradient(*one) for one in models.get(plan.model).gradients_in_backward_order()]


def row(plan: Plan, contract: Contract, curve: Curve, sender: Sender, done: dict[str, LearnDone]) -> dict[str, Any]:
    specs = [spec_of(plan, curve, seed) for seed in range(1, plan.seeds + 1)]
    interface = contract.interface(contract.head, contract.active_fabric)
    return {
        **asdict(curve),
        "sent_by": sender.engine,
        "kind": "emulated",
        "scale": specs[0].scale,
        "speed": specs[0].speed,
        "compute_ms": plans.compute_ms(plan, curve.batch),
        "learning_rate": specs[0].learning_rate,
        "period": specs[0].period,
        "runs": [training(plan, curve, sender, spec, done[spec.id], interface) for spec in specs if spec.id in done],
    }


def predicted_step_ms(plan: Plan, curve: Curve) -> float:
    """Of the named model on the emulated cluster: what the emulated step should take."""
    setup = Setup(
        model=plan.model,
        batch=curve.batch,
        single_step_ms=plans.compute_ms(plan, curve.batch),
        gpus=curve.nodes,
        gpus_per_node=1,
        rate_gbps=curve.rate_gbps,
        engine=curve.engine,
        placement="nodes" if curve.engine == "ps" else "even",
        period=plans.period(plan, curve.engine),
    )
    return step_ms(setup)


def training(
    plan: Plan, curve: Curve, sender: Sender, spec: LearnSpec, event: LearnDone, interface: str
) -> dict[str, Any]:
    hit = next((i for i, accuracy in enumerate(event.accuracy) if accuracy >= plan.target), None)
    sent = statistics.fmean(sent.get(interface, 0.0) for sent in event.sent.values())
    expected = expected_bytes(curve, sender, spec, event.elements)
    return {
        "seed": spec.seed,
        "seconds": event.seconds,
        "samples": event.samples,
        "accuracy": event.accuracy,
        "reached_s": None if hit is None else event.seconds[hit],
        "reached_samples": None if hit is None else event.samples[hit],
        "steps": event.steps,
        "step_ms": 1000 * event.seconds[-1] / event.steps,
        "staleness": event.staleness,
        "overrun": event.overrun,
        "sent_bytes": sent,
        "expected_bytes": expected,
        "proved": expected == 0 or abs(sent / expected - 1) <= 2 * transport.TOLERANCE,
        "digest": event.digest,
    }


def expected_bytes(curve: Curve, sender: Sender, spec: LearnSpec, elements: int) -> float:
    """Bytes of the small network that a node must send per step."""
    point = Point(
        fabric=curve.fabric,
        rate_gbps=curve.rate_gbps,
        nodes=curve.nodes,
        gpus_per_node=1,
        batch=curve.batch,
        model=models.NAMES[0],
        engine=sender.engine,
        device="emulated",
    )
    how = transport.algorithm(point, sender.settings)
    share = transport.share(how, curve.nodes, 1) if curve.nodes > 1 else 0.0
    return 4 * elements * share / spec.period * transport.WIRE_OVERHEAD
