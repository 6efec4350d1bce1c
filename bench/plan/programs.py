"""What each rank of an emulated cluster does in a step of a network that is split: computes, sends, receives, adds up.

The sizes are numbers of float32 at scale 1 and the times milliseconds of one device. `sent` counts what leaves the
ranks: the volume that a trial must prove.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.catalogue.units import Unit
from bench.plan import stages
from bench.plan.stages import Stage
from bench.worker.model_sizes import Size
from bench.worker.protocol import Operation

FORWARD_SHARE = 1 / 3
# A linear layer with fewer weights is not worth splitting.
LARGE_LINEAR = 1 << 22
Program = list[Operation]


@dataclass(frozen=True)
class Work:
    """A network's step on one device, which processes its share of the samples of all ranks."""

    parts: tuple[Unit, ...]
    compute_ms: float
    samples: int  # of all ranks together

    def forward(self, unit: Unit) -> Operation:
        return Operation("compute", self.compute_ms * FORWARD_SHARE * self.share(unit))

    def backward(self, unit: Unit) -> Operation:
        return Operation("compute", self.compute_ms * (1 - FORWARD_SHARE) * self.share(unit))

    def share(self, unit: Unit) -> float:
        return unit.macs / sum(one.macs for one in self.parts)


def fsdp(work: Work, ranks: int) -> list[Program]:
    """The weights of the next unit are gathered while one computes; its gradients are scattered after."""
    parts, last = work.parts, len(work.parts) - 1
    found = [Operation("gather", parts[0].parameters)]
    for at, unit in enumerate(parts):
        found.append(Operation("wait", at=at))
        if at < last:
            found.append(Operation("gather", parts[at + 1].parameters))
        found.append(work.forward(unit))
    # Number of the collective that gathers the unit again.
    gathered: dict[int, int] = {}
    started = len(parts)
    for at in reversed(range(len(parts))):
        if at < last:
            found.append(Operation("wait", at=gathered[at]))
        if at > 0:
            found.append(Operation("gather", parts[at - 1].parameters))
            gathered[at - 1], started = started, started + 1
        found += [work.backward(parts[at]), Operation("scatter", parts[at].parameters)]
        started += 1
    return [[*found, Operation("finish")]] * ranks


def large_linears(parts: Sequence[Unit]) -> list[Unit]:
    """The linear layers of a CNN that are worth splitting, without the output layer."""
    linear = [unit for unit in parts if unit.outputs and unit.layers[0].shapes and len(unit.layers[0].shapes[0]) == 2]
    return [unit for unit in linear if unit.parameters >= LARGE_LINEAR]


def tensor(work: Work, ranks: int, size: Size | None) -> list[Program]:
    program = _transformer(work, size) if size else _large_linears(work)
    return [[*program, Operation("finish")]] * ranks


def _transformer(work: Work, size: Size) -> Program:
    """Attention and the two linear layers after it each end in a sum over all ranks, forward and backward."""
    parts, started = work.parts, 0
    state = parts[1].inputs * work.samples
    found: Program = []

    def summed(step: Operation, count: int) -> None:
        nonlocal started
        for _ in range(count):
            found.append(Operation("compute", step.value / count))
            found.extend([Operation("sum", state), Operation("wait", at=started)])
            started += 1

    summed(work.forward(parts[0]), 1)
    for unit in parts[1:-1]:
        summed(work.forward(unit), 2)
    found.append(work.forward(parts[-1]))
    summed(work.backward(parts[-1]), 1)
    for unit in reversed(parts[1:-1]):
        summed(work.backward(unit), 2)
    found.append(work.backward(parts[0]))
    return found


def _large_linears(work: Work) -> Program:
    """The samples of all ranks go through each rank's share of the linear layers; the rest is data-parallel."""
    large = large_linears(work.parts)
    inputs, outputs = large[0].inputs * work.samples, large[-1].outputs * work.samples
    found: Program = []
    started = 0

    def collective(kind: str, values: float, wait: bool) -> None:
        nonlocal started
        found.append(Operation(kind, values))
        if wait:
            found.append(Operation("wait", at=started))
        started += 1

    for unit in work.parts:
        if unit is large[0]:
            collective("gather", inputs, wait=True)
        found.append(work.forward(unit))
        if unit is large[-1]:
            collective("scatter", outputs, wait=True)
    for unit in reversed(work.parts):
        if unit is large[-1]:
            collective("gather", outputs, wait=True)
        found.append(work.backward(unit))
        if unit is large[0]:
            collective("scatter", inputs, wait=True)
        if unit not in large:
            collective("sum", unit.parameters, wait=False)
    return found


def tiled(parts: Sequence[Unit]) -> int:
    """Number of units that see the image in tiles: all before the linear layers at the end."""
    return next(at for at, unit in enumerate(parts) if len(unit.layers[0].shapes[0]) == 2)


def spatial(work: Work, ranks: int) -> list[Program]:
    """A tile needs rows of its neighbours; the linear layers at the end run on all ranks alike."""
    parts, tiles = work.parts, tiled(work.parts)
    programs = []
    for rank in range(ranks):
        near = [other for other in (rank - 1, rank + 1) if 0 <= other < ranks]

        def halo(unit: Unit, near: list[int] = near) -> Program:
            rows = unit.halo * work.samples / 2
            if not rows:
                return []
            return [Operation(kind, rows, other) for kind in ("send", "receive") for other in near]

        found: Program = []
        for at, unit in enumerate(parts):
            if at == tiles:
                found += [Operation("gather", unit.inputs * work.samples), Operation("wait", at=0)]
            # Every rank reads the rows of the image that it needs.
            found += halo(unit) if 0 < at < tiles else []
            found.append(_whole(work.forward(unit), ranks) if at >= tiles else work.forward(unit))
        for at, unit in reversed(list(enumerate(parts))):
            found.append(_whole(work.backward(unit), ranks) if at >= tiles else work.backward(unit))
            found += halo(unit) if 0 < at < tiles else []
            found += [Operation("sum", unit.parameters)] if at < tiles else []
        programs.append([*found, Operation("finish")])
    return programs


def _whole(step: Operation, ranks: int) -> Operation:
    return Operation("compute", step.value * ranks)


def pipeline(
    cut: Sequence[Stage], ranks: int, micro_batches: int, micro_ms: float, samples: int, schedule: str
) -> tuple[list[Program], list[list[int]]]:
    """Programs and groups. Ranks are numbered pipeline by pipeline; samples: of a micro-batch.

    Groups after the first: the replicas of each stage, then the two ends of each pipeline.
    """
    deep = len(cut)
    replicas = ranks // deep
    groups = [list(range(ranks)), *([pipe * deep + at for pipe in range(replicas)] for at in range(deep))]
    groups += [[pipe * deep, pipe * deep + deep - 1] for pipe in range(replicas)]
    programs = []
    for rank in range(ranks):
        at = rank % deep
        stage = cut[at]
        found: Program = []
        for kind, _ in stages.order(schedule, at, deep, micro_batches):
            ahead = kind == "F"
            came, goes = (rank - 1, rank + 1) if ahead else (rank + 1, rank - 1)
            first, last = (at == 0, at == deep - 1) if ahead else (at == deep - 1, at == 0)
            before, after = (cut[at - 1].sends, stage.sends) if ahead else (stage.sends, cut[at - 1].sends)
            share = FORWARD_SHARE if ahead else 1 - FORWARD_SHARE
            found += [] if first else [Operation("receive", before * samples, came)]
            found.append(Operation("compute", micro_ms * stage.share * share))
            found += [] if last else [Operation("send", after * samples, goes)]
        if replicas > 1:
            found.append(Operation("sum", stage.parameters, 1 + at))
        if stage.shares_parameters and deep > 1:
            found.append(Operation("sum", stage.shares_parameters, 1 + deep + rank // deep))
        programs.append([*found, Operation("finish")])
    return programs, groups


def sent(programs: Sequence[Program], groups: Sequence[Sequence[int]]) -> float:
    """Numbers that all ranks send together in a step."""
    total = 0.0
    for program in programs:
        for one in program:
            size = len(groups[one.at]) if one.kind in ("gather", "scatter", "sum") else 1
            factor = {"gather": 1, "scatter": 1, "sum": 2}.get(one.kind, 0) * (size - 1) / size
            total += one.value * (1 if one.kind == "send" else factor)
    return total
