"""From trials to points on a curve: repeats merged, families that may share a plot, scaling efficiency."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from bench.results import dimensions, settings
from bench.results.dimensions import ENGINE_NAMES, MODEL_NAMES
from bench.results.trial import Breakdown, Interval, LinkEvidence, Point, Trial


@dataclass(frozen=True, order=True)
class Family:
    """The conditions that all points on one plot have in common. Kinds of devices never mix."""

    model: str
    device: str
    gpus_per_node: int
    engine: str
    compression: str
    data: str
    kind: str
    # The GPU's name, if the run records it. A trial only records cuda.
    gpu: str = ""

    @property
    def hardware(self) -> tuple[str, str, int, str]:
        return (self.model, self.device, self.gpus_per_node, self.kind)

    @property
    def device_name(self) -> str:
        if self.kind == "emulated":
            return self.device.removeprefix("emulated:").split("-")[0].upper()
        return {"cuda": self.gpu or "GPU", "cpu": "CPU"}.get(self.device, self.device)

    @property
    def model_name(self) -> str:
        return MODEL_NAMES.get(self.model, self.model)

    @property
    def variant(self) -> str:
        parts = [ENGINE_NAMES.get(self.engine, self.engine)]
        if self.compression != "none":
            parts.append(self.compression)
        if self.data != "synthetic":
            parts.append(dimensions.data_name(self.data))
        return ", ".join(parts)

    @property
    def label(self) -> str:
        per_node = f", {self.gpus_per_node} GPUs per node" if self.gpus_per_node > 1 else ""
        emulated = "emulated " if self.kind == "emulated" else ""
        data = f", {self.data}" if self.data != "synthetic" else ""
        engine = ENGINE_NAMES.get(self.engine, self.engine)
        compression = f", {self.compression}" if self.compression != "none" else ""
        return f"{self.model_name}, {emulated}{self.device_name}{per_node}, {engine}{compression}{data}"


@dataclass
class MergedPoint:
    """One point: all repeats of one set of conditions, merged."""

    family: Family
    fabric: str
    transport: str
    rate_gbps: float
    nodes: int
    batch: int
    trials: list[Trial]
    ips: Interval
    step_ms: Interval
    breakdown: Breakdown | None
    bus_gbps: Interval | None
    link_gbps: float | None
    # Unique within the table.
    fabric_label: str = ""
    efficiency: Interval | None = None
    efficiency_gpu: float | None = None
    # The batch that is constant along a curve: per GPU, or in total with strong scaling.
    group: int = 0
    ideal: float | None = None

    @property
    def link(self) -> tuple[str, str]:
        """A curve belongs to a fabric and its transport."""
        return (self.fabric, self.transport)

    @property
    def conditions(self) -> Point:
        return self.trials[0].point

    @property
    def link_evidence(self) -> LinkEvidence | None:
        return next((trial.link for trial in reversed(self.trials) if trial.link), None)

    @property
    def gpus(self) -> int:
        return self.nodes * self.family.gpus_per_node

    @property
    def host_cpu(self) -> float | None:
        return middle([trial.host_cpu_percent for trial in self.trials])

    @property
    def decode_busy(self) -> float | None:
        return middle([trial.input.decode_busy if trial.input else None for trial in self.trials])

    @property
    def stragglers(self) -> list[str]:
        return sorted({name for trial in self.trials for name in trial.stragglers})

    @property
    def converged(self) -> bool | None:
        checks = [trial.emulation.converged for trial in self.trials if trial.emulation]
        if False in checks:
            return False
        return True if True in checks else None

    @property
    def scale(self) -> float | None:
        return middle([trial.emulation.scale if trial.emulation else None for trial in self.trials])

    @property
    def slowdown(self) -> float | None:
        return middle([trial.emulation.slowdown if trial.emulation else None for trial in self.trials])


@dataclass
class Table:
    """Everything a report draws."""

    points: list[MergedPoint]
    failed: list[Trial]
    notes: list[str] = field(default_factory=list)
    strong: bool = False

    @property
    def families(self) -> list[Family]:
        """Sorted by their number of points; the first is the headline."""
        counts = Counter(point.family for point in self.points)
        return sorted(counts, key=lambda family: (-counts[family], not family.engine.startswith("horovod"), family))

    @cached_property
    def by_family(self) -> dict[Family, list[MergedPoint]]:
        found: dict[Family, list[MergedPoint]] = defaultdict(list)
        for point in self.points:
            found[point.family].append(point)
        return found

    def of(self, family: Family) -> list[MergedPoint]:
        return self.by_family.get(family, [])

    @cached_property
    def varying(self) -> list[str]:
        """The conditions in which its points differ."""
        return dimensions.varying(point.conditions for point in self.points)


def middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def merge(intervals: Iterable[Interval | None]) -> Interval | None:
    """Median of the repeats; the interval covers every repeat's own, so it never claims more than any of them."""
    known = [interval for interval in intervals if interval is not None]
    if not known:
        return None
    return Interval(
        median=statistics.median(interval.median for interval in known),
        low=min(interval.low for interval in known),
        high=max(interval.high for interval in known),
    )


def merge_breakdowns(trials: list[Trial]) -> Breakdown | None:
    known = [trial.breakdown_ms for trial in trials if trial.breakdown_ms is not None]
    if not known:
        return None
    return Breakdown(
        **{name: statistics.median(getattr(one, name) for one in known) for name in Breakdown.model_fields}
    )


def family_of(trial: Trial, gpu: str = "") -> Family:
    point, named = trial.point, gpu if trial.kind == "cuda" else ""
    where = (point.model, point.device, point.gpus_per_node)
    return Family(*where, point.engine, point.compression, point.data, trial.kind, named)


def tabulate(trials: list[Trial], strong: bool = False, gpu: str = "") -> Table:
    groups: dict[tuple[Family, str, str, float, int, int], list[Trial]] = defaultdict(list)
    unmeasured = 0
    for trial in trials:
        if trial.status != "ok":
            continue
        if trial.step_ms is None or trial.images_per_second is None or trial.step_ms.median <= 0:
            unmeasured += 1
            continue
        at = trial.point
        key = (family_of(trial, gpu), at.fabric, at.transport, at.rate_gbps, at.nodes, at.batch)
        groups[key].append(trial)
    points = []
    for (family, fabric, transport, rate, nodes, batch), members in groups.items():
        ips, step = merge(t.images_per_second for t in members), merge(t.step_ms for t in members)
        if ips is None or step is None:
            continue
        points.append(
            MergedPoint(
                family=family,
                fabric=fabric,
                transport=transport,
                rate_gbps=rate,
                nodes=nodes,
                batch=batch,
                trials=members,
                ips=ips,
                step_ms=step,
                breakdown=merge_breakdowns(members),
                bus_gbps=merge(t.bus_bandwidth_gbps for t in members),
                link_gbps=middle(t.link_gbps for t in members),
                group=batch * nodes * family.gpus_per_node if strong else batch,
            )
        )
    ambiguous = "rate" in dimensions.varying(point.conditions for point in points)
    for merged in points:
        merged.fabric_label = dimensions.label(merged.conditions, ("fabric", "rate") if ambiguous else ("fabric",))
    points.sort(key=lambda point: (point.family, point.rate_gbps, point.link, point.group, point.nodes))
    table = Table(points=points, failed=[trial for trial in trials if trial.status == "failed"], strong=strong)
    if unmeasured:
        table.notes.append(f"{unmeasured} trials have status ok but no step time; they were left out")
    table.notes += settings.mixed(trials)
    correct_links(table)
    add_efficiency(table)
    return table


def correct_links(table: Table) -> None:
    """A link carries at least what the trials on it reached, whatever an earlier measurement of it says."""
    reached: dict[tuple[str, str, float], float] = defaultdict(float)
    for point in table.points:
        if point.bus_gbps is not None:
            key = (*point.link, point.rate_gbps)
            reached[key] = max(reached[key], point.bus_gbps.median)
    for point in table.points:
        if point.link_gbps is not None:
            point.link_gbps = max(point.link_gbps, reached[(*point.link, point.rate_gbps)])


def add_efficiency(table: Table) -> None:
    """Efficiency relative to one node of the same family and batch. One node uses no fabric, so any fabric's serves."""
    ones: dict[tuple[Family, int], list[MergedPoint]] = defaultdict(list)
    one_gpu: dict[tuple[Family, int], MergedPoint] = {}
    for point in table.points:
        if point.nodes == 1:
            ones[(point.family, point.group)].append(point)
            if point.gpus == 1:
                one_gpu[(point.family, point.batch)] = point
    estimated: set[str] = set()
    for point in table.points:
        candidates = ones.get((point.family, point.group), [])
        own = [one for one in candidates if one.link == point.link and one.rate_gbps == point.rate_gbps]
        base = merge(one.ips for one in own or candidates)
        if base is None and point.breakdown is not None and point.breakdown.compute > 0:
            rate = point.family.gpus_per_node * point.batch / point.breakdown.compute * 1000
            base = Interval(median=rate, low=rate, high=rate)
            estimated.add(f"{point.family.label}, batch {point.batch}")
        if base is None or min(base.low, base.median) <= 0:
            continue
        point.ideal = point.nodes * base.median
        point.efficiency = Interval(
            median=point.ips.median / point.ideal,
            low=point.ips.low / (point.nodes * base.high),
            high=point.ips.high / (point.nodes * base.low),
        )
        if point.nodes == 1 and own:
            # A point relative to itself is 1 by definition. Its interval would only repeat that of the throughput.
            point.efficiency = Interval(median=1.0, low=1.0, high=1.0)
        single = one_gpu.get((replace(point.family, gpus_per_node=1), point.batch))
        if single is not None:
            point.efficiency_gpu = point.ips.median / (point.gpus * single.ips.median)
    for text in sorted(estimated)[:5]:
        table.notes.append(f"no one-node point for {text}: its efficiency is calculated against compute time alone")
