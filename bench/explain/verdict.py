"""One sentence on how the cluster scales, why, and what would change it; and the findings below it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from bench import words
from bench.explain import diagnosis, whatif
from bench.explain.diagnosis import Diagnosis
from bench.results.points import Family, MergedPoint, Table
from bench.results.runs import Run
from bench.results.trial import Trial

GOOD = 0.80
MOST_COMPARISONS = 3


@dataclass(frozen=True)
class Part:
    """A part of the sentence. A number keeps its value, so that it can be checked against the data."""

    text: str
    key: str = ""
    value: float | None = None
    source: str = ""


@dataclass
class Verdict:
    parts: list[Part]
    limit: str
    point: MergedPoint | None = None
    diagnosis: Diagnosis | None = None
    findings: list[str] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def numbers(self) -> dict[str, float]:
        return {part.key: part.value for part in self.parts if part.key and part.value is not None}

    def as_json(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence,
            "limit": self.limit,
            "numbers": self.numbers,
            "predicted": [part.key for part in self.parts if part.source == "predicted"],
            "reason": self.diagnosis.reason if self.diagnosis else None,
            "change": self.diagnosis.change if self.diagnosis else None,
            "findings": self.findings,
        }


def text(words_: str) -> Part:
    return Part(words_)


def share(key: str, value: float, source: str = "measured") -> Part:
    return Part(words.percent(value), key, value, source)


def judge(run: Run, table: Table) -> Verdict:
    verdict = headline(table)
    verdict.findings = findings(run, table, verdict)
    return verdict


def headline(table: Table) -> Verdict:
    stray = [(trial, nodes) for trial in table.failed if (nodes := diagnosis.stray_interfaces(trial))]
    family = table.families[0] if table.families else None
    points = [point for point in table.of(family) if point.nodes > 1] if family else []
    if not points:
        if stray:
            return wrong_nic_verdict(*max(stray, key=lambda found: found[0].point.nodes))
        if family is not None:
            return one_node_verdict(family, table)
        if table.failed:
            first = words.brief(table.failed[0].error or "no error text was recorded")
            return Verdict(
                [
                    text("No verdict yet: all "),
                    Part(f"{len(table.failed)}", "failed", len(table.failed), "measured"),
                    text(f" trials failed. The first: {first}"),
                ],
                "unknown",
            )
        return Verdict([text("No verdict yet: the run has no measured trial.")], "unknown")
    point = headline_point(points)
    found = diagnosis.diagnose(point)
    if found.limit == "wrong-nic":
        trial = next(trial for trial in point.trials if diagnosis.stray_interfaces(trial))
        return wrong_nic_verdict(trial, diagnosis.stray_interfaces(trial))
    return Verdict(sentence(point, found, table), found.limit, point, found)


def headline_point(points: list[MergedPoint]) -> MergedPoint:
    """Slowest fabric, most nodes, middle batch: where scaling is hardest, at a typical batch."""
    slowest = min(point.rate_gbps for point in points)
    on_it = [point for point in points if point.rate_gbps == slowest]
    most = max(point.nodes for point in on_it)
    candidates = sorted((point for point in on_it if point.nodes == most), key=lambda point: point.batch)
    return candidates[(len(candidates) - 1) // 2]


def subject(point: MergedPoint) -> list[Part]:
    family = point.family
    emulated = "emulated " if family.kind == "emulated" else ""
    nodes = words.count(point.nodes, "node").split(" ")
    per_node = f" of {family.gpus_per_node} {family.device_name}s" if family.gpus_per_node > 1 else ""
    device = "" if per_node else f"{family.device_name} "
    return [
        text(f"On {words.fabric(point)} "),
        Part(nodes[0], "nodes", point.nodes, "measured"),
        text(f" {emulated}{device}{nodes[1]}{per_node} "),
    ]


def sentence(point: MergedPoint, found: Diagnosis, table: Table) -> list[Part]:
    parts = subject(point)
    step, split = point.step_ms.median, point.breakdown
    if found.limit in ("storage", "decode") and split is not None:
        # If all nodes wait for data alike, scaling is perfect: efficiency would hide the problem.
        what = "reading the data" if found.limit == "storage" else "decoding images on the CPU"
        faster = step / (step - split.data_wait)
        thing = "storage" if found.limit == "storage" else "decoding"
        return [
            *parts,
            text("keep their accelerators busy "),
            share("busy", split.compute / step),
            text(f" of the time: {what} is the limit; {thing} "),
            Part(words.significant(faster, 2), "faster", faster, "derived"),
            text(" times as fast would feed them"),
            text("."),
        ]
    if point.efficiency is None:
        return [*parts, text("were measured, but without a one-node point their efficiency is not known.")]
    parts += [text("train at "), share("efficiency", point.efficiency.median), text(" efficiency: ")]
    if found.limit == "straggler" and split is not None:
        names = words.several(point.stragglers) if point.stragglers else "a slow node"
        without = min(1.0, point.efficiency.median * step / (step - split.straggler_wait))
        return [
            *parts,
            text(
                f"{names} is the limit; the others wait for it "
                if len(point.stragglers) < 2
                else f"{names} are the limit; the others wait for them "
            ),
            share("straggler_wait", split.straggler_wait / step),
            text(" of every step, and without that wait it would be "),
            share("without_straggler", without, "derived"),
            text("."),
        ]
    if found.limit == "compute":
        rest = 1 - point.efficiency.median
        tail = [text("the accelerators are the limit, as they should be")]
        if rest >= 0.005:
            tail += [text("; a perfect network would add at most "), share("left", rest, "derived")]
        return [*parts, *tail, text(".")]
    if found.limit == "host-cpu":
        cpu = (point.host_cpu or 0.0) / 100
        lead = "the computer that runs the scale model" if point.family.kind == "emulated" else "the host CPU"
        tail = [text(f"{lead} is the limit (CPU "), share("host_cpu", cpu), text(" busy), not the network")]
        if point.family.kind == "emulated":
            tail += [text("; these figures are too low")]
        return [*parts, *tail, text(".")]
    if found.limit == "link" and point.link_gbps is not None:
        return [
            *parts,
            text("the link is the limit and delivers only "),
            Part(words.significant(point.link_gbps, 2), "link_gbps", point.link_gbps, "measured"),
            text(" of "),
            Part(words.gbps(point.rate_gbps), "rate_gbps", point.rate_gbps, "configured"),
            text("; repair it before changing anything else."),
        ]
    if found.limit == "collective" and point.bus_gbps is not None:
        link = point.link_gbps or point.rate_gbps
        parts += [
            text("the all-reduce is the limit, not the wire; it uses "),
            share("link_used", point.bus_gbps.median / link),
            text(" of the link"),
        ]
        curve = whatif.curve_for(point)
        if curve is not None:
            full = curve.with_share(0.9 * link / point.rate_gbps)
            parts += [text(", and tuned to use 90% would give "), share("tuned", full, "predicted")]
            if full < GOOD:
                parts += [text(", after which the network is the limit")]
        return [*parts, text(".")]
    if found.limit == "network":
        return [*parts, text("the network is the limit"), *network_options(point, table), text(".")]
    return [*parts, text("what limits it was not recorded.")]


def network_options(point: MergedPoint, table: Table) -> list[Part]:
    """Faster fabrics: measured ones, or else the next common rate as a prediction; then the rate for 80%."""
    same = [
        other
        for other in table.of(point.family)
        if other.nodes == point.nodes and other.group == point.group and other.rate_gbps > point.rate_gbps
    ]
    options: list[Part] = []
    for number, other in enumerate(sorted(same, key=lambda other: other.rate_gbps)[:2]):
        if other.efficiency is None:
            continue
        lead = "; " if not options else ", "
        verb = " gives " if number == 0 else " "
        options += [
            text(f"{lead}{words.fabric(other)}{verb}"),
            share(f"efficiency:{other.fabric}", other.efficiency.median),
        ]
    curve = whatif.curve_for(point, table)
    if curve is None:
        return options
    if not options:
        faster = next(
            rate for rate in (10.0, 25.0, 100.0, 400.0, 10 * point.rate_gbps) if rate >= 2.5 * point.rate_gbps
        )
        options += [
            text(f"; {words.gbps(faster)} would give "),
            share(f"efficiency:{faster:g}", curve.efficiency(faster), "predicted"),
        ]
    if point.efficiency is not None and point.efficiency.median < GOOD:
        enough = curve.rate_for(GOOD)
        if enough is None:
            options += [
                text(
                    f", and no link over {words.TRANSPORTS[curve.setup.transport]} alone reaches {words.percent(GOOD)}"
                )
            ]
        elif enough > point.rate_gbps:
            options += [
                text(", and about "),
                Part(words.gbps(enough), "rate_for_80", enough, "predicted"),
                text(f" is enough for {words.percent(GOOD)}"),
            ]
    return options


def wrong_nic_verdict(trial: Trial, stray: dict[str, tuple[str, float]]) -> Verdict:
    found = diagnosis.wrong_interface(trial, stray)
    interface = max(stray.values(), key=lambda item: item[1])[0]
    part = sum(share_ for _, share_ in stray.values()) / len(stray)
    intended = trial.traffic.interface if trial.traffic else "the fabric's interface"
    fabric = words.fabric(trial.point)
    return Verdict(
        [
            text(f"{fabric} was not used: "),
            share("stray", part),
            text(
                f" of the bytes went over {interface} instead of {intended}, so how it scales on {fabric} is not known."
            ),
        ],
        "wrong-nic",
        None,
        found,
    )


def one_node_verdict(family: Family, table: Table) -> Verdict:
    point = max(table.of(family), key=lambda point: point.ips.median)
    emulated = "emulated " if family.kind == "emulated" else ""
    return Verdict(
        [
            text(f"One {emulated}{family.device_name} node trains {family.model_name} at "),
            Part(words.significant(point.ips.median), "images_per_second", point.ips.median, "measured"),
            text(f" images/s at batch {point.batch}; a run with two nodes or more shows how it scales."),
        ],
        "unknown",
        point,
        diagnosis.diagnose(point),
    )


def findings(run: Run, table: Table, verdict: Verdict) -> list[str]:
    """Short facts beside the verdict, most important first."""
    out: list[str] = []
    point = verdict.point
    if verdict.diagnosis is not None and not (point is not None and point.nodes == 1):
        reason = verdict.diagnosis.reason
        out.append(f"Why: {reason}. What to change: {verdict.diagnosis.change}.")
    if point is not None and point.nodes > 1 and point.efficiency is not None:
        same = [
            other
            for other in table.of(point.family)
            if (other.link, other.rate_gbps, other.nodes) == (point.link, point.rate_gbps, point.nodes)
            and other.efficiency is not None
        ]
        if len(same) > 1:
            listed = ", ".join(
                f"{words.percent(other.efficiency.median)} at {other.batch}" for other in same if other.efficiency
            )
            out.append(
                f"The batch matters: on {words.fabric(point)} with {point.nodes} nodes the efficiency is "
                f"{listed} images per GPU."
            )
    out += real_data(table)
    for fabric, trials in stray_by_fabric(table, verdict).items():
        found = diagnosis.wrong_interface(trials[0], diagnosis.stray_interfaces(trials[0]))
        out.append(f"{fabric} was not used in {len(trials)} trials: {found.reason}.")
    slow = sorted({name for other in table.points for name in other.stragglers})
    if slow and verdict.limit != "straggler":
        out.append(f"Slow nodes: {words.several(slow)}.")
    unsure = [other for other in table.points if other.converged is False]
    if unsure:
        out.append(
            f"{len(unsure)} of {len(table.points)} emulated points changed by more than 5% at twice the scale factor; "
            "they are drawn hollow."
        )
    return out


def real_data(table: Table) -> list[str]:
    """Real images against synthetic ones at the same point, largest cluster first; and skipped samples."""
    out: list[str] = []
    same = {
        (replace(point.family, data="synthetic"), point.link, point.nodes, point.batch): point
        for point in table.points
        if point.family.data == "synthetic"
    }
    for point in sorted(table.points, key=lambda point: -point.nodes):
        other = same.get((replace(point.family, data="synthetic"), point.link, point.nodes, point.batch))
        if point.family.data == "synthetic" or other is None or len(out) == MOST_COMPARISONS:
            continue
        wait = point.breakdown.data_wait / point.step_ms.median if point.breakdown else 0.0
        kept = words.percent(point.ips.median / other.ips.median)
        out.append(
            f"Real data: {words.significant(point.ips.median)} images/s against "
            f"{words.significant(other.ips.median)} synthetic ({kept}) on "
            f"{words.fabric(point)}, {words.count(point.nodes, 'node')}, batch {point.batch}; the accelerators "
            f"wait for images {words.percent(wait)} of the time."
        )
    damage: dict[str, int] = {}
    for point in table.points:
        for trial in point.trials:
            for kind, count in (trial.input.skipped if trial.input else {}).items():
                damage[kind] = damage.get(kind, 0) + count
    if damage:
        listed = ", ".join(f"{kind} ({count})" for kind, count in sorted(damage.items()))
        out.append(f"Samples were skipped: {listed}; trials.jsonl names some of them, `bench data verify` finds all.")
    return out


def stray_by_fabric(table: Table, verdict: Verdict) -> dict[str, list[Trial]]:
    if verdict.limit == "wrong-nic":
        return {}
    found: dict[str, list[Trial]] = {}
    for trial in table.failed:
        if diagnosis.stray_interfaces(trial):
            found.setdefault(words.fabric(trial.point), []).append(trial)
    return found


def missing(run: Run, table: Table) -> list[str]:
    """What the report cannot show, and why."""
    out = [*run.problems, *table.notes]
    if table.failed:
        nodes = sorted({trial.error_node for trial in table.failed if trial.error_node})
        where = f" (on {words.several(nodes)})" if nodes else ""
        out.append(f"{len(table.failed)} of {len(run.trials)} trials failed{where}")
    planned = run.plan.get("fabrics")
    if isinstance(planned, list):
        seen = {point.fabric for point in table.points}
        absent = [name for entry in planned if (name := fabric_name(entry)) and name not in seen]
        if absent:
            names = [words.fabric_name(name, run.transport(name)) for name in absent]
            out.append(f"planned but not measured: fabric {words.several(names, 6)}")
    if table.points and max(point.nodes for point in table.points) == 1:
        out.append("only one node was measured: efficiency needs two or more")
    if table.points and not any(point.bus_gbps for point in table.points if point.nodes > 1):
        out.append("no bus bandwidth was recorded")
    if table.points and not any(point.breakdown for point in table.points):
        out.append("no breakdown of the step time was recorded")
    return out


def fabric_name(entry: object) -> str | None:
    """A plan lists fabrics as names or as objects with a name."""
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict) and isinstance(entry.get("name"), str):
        return str(entry["name"])
    return None
