"""The path of an image from disk to weight update as a flow network, and its weakest link by minimum cut.

Every capacity is in images per second of the whole cluster, so that a disk, a core and a link can be compared.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import networkx

from bench import words
from bench.catalogue import interconnect
from bench.explain import diagnosis
from bench.explain.diagnosis import LINK_FULL
from bench.parse import quantity
from bench.results.points import MergedPoint
from cluster.core.errors import UserError

IMAGE_BYTES = 110_000.0
TENSOR_BYTES = 224 * 224 * 3 * 4.0
# Speeds in bytes/s of components that were not measured: sequential rates of vendors, and PCIe 3.0 x16 in practice.
PUBLISHED = {"ssd": 0.4e9, "pcie": 1e9 * interconnect.PCIE_IN_GBYTES}
# Flow algorithms need integers: the unit is a thousandth of an image per second.
GRAIN = 1000
EXPLICIT_NODES = 64

STAGES = {
    "storage": "storage",
    "share": "share's network link",
    "decode": "decode CPU",
    "pcie": "PCIe",
    "accelerator": "accelerator",
    "barrier": "slowest node",
    "host": "host CPU",
    "allreduce": "all-reduce",
    "fabric": "fabric",
}
UNITS = {"images/s": 1.0, "b/s": 1.0, "mb/s": 1e6, "gb/s": 1e9, "gbit/s": 1e9 / 8, "mbit/s": 1e6 / 8}


@dataclass(frozen=True)
class Stage:
    """One link of the chain. A capacity of None is not known and counts as no limit."""

    name: str
    capacity: float | None
    source: str
    detail: str
    per_node: bool = True
    used: bool = True

    def as_json(self, observed: float) -> dict[str, Any]:
        return {
            "stage": self.name,
            "label": STAGES[self.name],
            "images_per_second": self.capacity,
            "use": observed / self.capacity if self.used and self.capacity else None,
            "source": self.source,
            "detail": self.detail,
        }


def parse_capacity(text: str) -> tuple[str, dict[str, Any]]:
    """NAME=VALUE UNIT, such as storage=200MB/s or decode=180images/s, on the command line."""
    name, _, rest = text.partition("=")
    found = quantity(rest, UNITS)
    if name not in STAGES or found is None:
        raise UserError(
            f"--capacity: {text!r} is not NAME=VALUE; use for instance storage=200MB/s or decode=180images/s per node "
            f"(names: {', '.join(STAGES)}; units: images/s, MB/s, GB/s, Mbit/s, Gbit/s)"
        )
    return name, {"value": found[0], "unit": found[1] or "images/s", "per": "node", "source": "given"}


def known_capacity(name: str, given: Any, point: MergedPoint, bytes_per_image: float) -> Stage | None:
    """A capacity from capacities.json or the command line; None if it is absent or not valid."""
    if not isinstance(given, dict) or not isinstance(given.get("value"), int | float):
        return None
    unit = str(given.get("unit", "images/s")).lower()
    if unit not in UNITS or given["value"] <= 0:
        return None
    rate = float(given["value"]) * UNITS[unit]
    images = rate if unit == "images/s" else rate / bytes_per_image
    times = {"node": point.nodes, "gpu": point.gpus}.get(str(given.get("per", "node")), 1)
    detail = f"{given['value']:g} {given.get('unit', 'images/s')} per {given.get('per', 'node')}"
    return Stage(name, images * times, str(given.get("source", "measured")), detail, per_node=times > 1)


def stages(point: MergedPoint, capacities: dict[str, Any], limit: str) -> list[Stage]:
    return [*input_stages(point, capacities, limit), *step_stages(point, capacities, limit)]


def input_stages(point: MergedPoint, capacities: dict[str, Any], limit: str) -> list[Stage]:
    if point.family.data == "synthetic":
        return [Stage("storage", None, "not used", "synthetic images are made on the device", used=False)]
    observed = point.ips.median
    shared = "://" in point.family.data
    out = []
    storage = known_capacity("storage", capacities.get("storage"), point, IMAGE_BYTES)
    if storage is None and limit == "storage":
        storage = Stage("storage", observed, "measured", "what it delivered while the accelerators waited", not shared)
    if storage is None:
        times = 1 if shared else point.nodes
        rate = PUBLISHED["ssd"] * times / IMAGE_BYTES
        storage = Stage("storage", rate, "published", f"{times} x SSD 0.4 GB/s, 110 KB per image", not shared)
    out.append(storage)
    if shared:
        link = point.link_gbps or point.rate_gbps
        source = "measured" if point.link_gbps else "configured"
        detail = f"{words.gbps(link)} out of the server, 110 KB per image"
        out.append(Stage("share", link * 1e9 / 8 / IMAGE_BYTES, source, detail, per_node=False))
    decode = known_capacity("decode", capacities.get("decode"), point, IMAGE_BYTES) or decode_seen(point)
    if limit == "decode" and (decode is None or (decode.capacity or 0) > observed):
        decode = Stage("decode", observed, "measured", "what it delivered while the accelerators waited")
    out.append(decode or Stage("decode", None, "not known", "run `bench data bench`, or pass --capacity decode=..."))
    if point.family.kind == "cuda":
        pcie = known_capacity("pcie", capacities.get("pcie"), point, TENSOR_BYTES)
        rate = PUBLISHED["pcie"] * point.gpus / TENSOR_BYTES
        out.append(pcie or Stage("pcie", rate, "published", "12 GB/s per GPU (PCIe 3.0 x16), 602 KB per image"))
    return out


def decode_seen(point: MergedPoint) -> Stage | None:
    """The decode rate that the trials measured."""
    seen = [trial.input for trial in point.trials if trial.input and trial.input.decode_images_per_second > 0]
    if not seen:
        return None
    rate = statistics.median(one.decode_images_per_second for one in seen)
    cores = point.gpus * seen[0].cores
    detail = f"{words.count(cores, 'core')} at {words.significant(rate / cores)} images/s each"
    return Stage("decode", rate, "measured", detail)


def step_stages(point: MergedPoint, capacities: dict[str, Any], limit: str) -> list[Stage]:
    parts = point.breakdown
    images = point.gpus * point.batch
    out = []
    if parts is not None and parts.compute > 0:
        source, emulated = ("published", ", emulated") if point.family.kind == "emulated" else ("measured", "")
        detail = f"{words.significant(parts.compute)} ms compute per step of {point.batch} images per GPU{emulated}"
        out.append(Stage("accelerator", 1000 * images / parts.compute, source, detail))
        if parts.straggler_wait > 0.05 * parts.compute:
            slow = parts.compute + parts.straggler_wait
            who = words.several(point.stragglers) if point.stragglers else "a node"
            detail = f"{who} needs {words.significant(slow)} ms and the others wait"
            out.append(Stage("barrier", 1000 * images / slow, "measured", detail, per_node=False))
    if limit == "host-cpu" and point.host_cpu:
        detail = f"{point.host_cpu:.0f}% busy at this rate"
        out.append(Stage("host", point.ips.median * 100 / point.host_cpu, "measured", detail))
    if point.nodes > 1:
        out += fabric_stages(point, capacities)
    return out


def fabric_stages(point: MergedPoint, capacities: dict[str, Any]) -> list[Stage]:
    wire = diagnosis.wire_bytes(point.trials[0].point)
    if wire is None:
        return [Stage("fabric", None, "not known", f"the gradient size of {point.family.model} is not known")]
    images = point.gpus * point.batch
    link = point.link_gbps or point.rate_gbps
    source = "measured" if point.link_gbps else "configured"
    given = capacities.get("fabric")
    if isinstance(given, dict) and str(given.get("unit", "")).lower() in ("gbit/s", "mbit/s"):
        link = float(given["value"]) * UNITS[str(given["unit"]).lower()] * 8 / 1e9
        source = str(given.get("source", "given"))
    full = images * link * 1e9 / 8 / wire
    sent = f"{wire / 1e6:.0f} MB per node and step"
    if point.bus_gbps is None or point.bus_gbps.median <= 0:
        return [Stage("fabric", full, source, f"{words.gbps(link)}, {sent}")]
    bus = point.bus_gbps.median
    reached = images * bus * 1e9 / 8 / wire
    if bus < LINK_FULL * link:
        return [
            Stage("allreduce", reached, "measured", f"{words.gbps(bus)} bus bandwidth on a {words.gbps(link)} link"),
            Stage("fabric", full, source, f"{words.gbps(link)}, {sent}"),
        ]
    return [Stage("fabric", reached, "measured", f"{words.gbps(bus)} bus bandwidth, {sent}")]


@dataclass(frozen=True)
class Cut:
    stages: tuple[str, ...]
    images_per_second: float

    def as_json(self) -> dict[str, Any]:
        label = words.several([STAGES[name] for name in self.stages])
        return {"stages": list(self.stages), "label": label, "images_per_second": self.images_per_second}


def minimum_cut(chain: list[Stage], nodes: int) -> Cut | None:
    """The stages that together limit the flow; None if no capacity is known."""
    known = [stage for stage in chain if stage.used and stage.capacity]
    if not known:
        return None
    graph = build(known, min(nodes, EXPLICIT_NODES))
    value, (near, _) = networkx.minimum_cut(graph, "start", "end")
    crossed = {data["stage"] for u, v, data in graph.edges(data=True) if u in near and v not in near}
    return Cut(tuple(stage.name for stage in known if stage.name in crossed), value / GRAIN)


def build(known: list[Stage], nodes: int) -> networkx.DiGraph[str]:
    """Shared stages are one edge, the others one edge per node; a node only takes the path through itself."""
    graph: networkx.DiGraph[str] = networkx.DiGraph()
    ends = ["start"]
    for stage in known:
        capacity = round((stage.capacity or 0) * GRAIN)
        if stage.per_node:
            sources = ends if len(ends) > 1 else ends * nodes
            targets = [f"{stage.name}/{node}" for node in range(nodes)]
            share, left = divmod(capacity, nodes)
            for node, (u, v) in enumerate(zip(sources, targets, strict=True)):
                graph.add_edge(u, v, capacity=share + (node < left), stage=stage.name)
            ends = targets
        else:
            gate = f"{stage.name}/in"
            for u in ends:
                # Merging costs nothing: an edge without a capacity is unlimited.
                graph.add_edge(u, gate, stage=stage.name)
            graph.add_edge(gate, f"{stage.name}/out", capacity=capacity, stage=stage.name)
            ends = [f"{stage.name}/out"]
    for u in ends:
        graph.add_edge(u, "end", stage=known[-1].name)
    return graph


def without(chain: list[Stage], names: tuple[str, ...]) -> list[Stage]:
    return [stage for stage in chain if stage.name not in names]
