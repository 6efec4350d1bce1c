"""One sentence on how the cluster scales, why, and what would change it; and the findings below it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from bench import words
from bench.explain import diagnosis, whatif
from bench.explain.diagnosis import Diagnosis, Stray
from bench.results import dimensions
from bench.results.points import Family, MergedPoint, Table
from bench.results.runs import Run
from bench.results.trial import Trial

GOOD = 0.80
MOST_COMPARISONS = 3
MOST_VERDICTS = 200
PLACE = ("fabric", "nodes", "batch")
# The dimensions of a family that a sentence names where they vary. It always names the device.
FAMILY = ("model", "engine", "compression", "data")


@dataclass(frozen=True)
class Part:
    """A part of the sentence. A number keeps its value, so that it can be checked against the data."""

    text: str
    key: str = ""
    value: float | None = None
    source: str = ""


Pieces = list[str | Part]


@dataclass
class Verdict:
    pieces: Pieces
    limit: str
    point: MergedPoint | None = None
    diagnosis: Diagnosis | None = None
    findings: list[str] = field(default_factory=list)

    @property
    def parts(self) -> list[Part]:
        return [Part(one) if isinstance(one, str) else one for one in self.pieces]

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


def share(key: str, value: float, source: str = "measured") -> Part:
    return Part(words.percent(value), key, value, source)


def judge(table: Table, family: Family | None = None, shared: RunFindings | None = None) -> Verdict:
    """The verdict on a family, by default the first: the one with the most points."""
    verdict = headline(table, family or (table.families[0] if table.families else None))
    verdict.findings = findings(table, verdict, shared or run_findings(table))
    return verdict


def judge_families(table: Table) -> dict[Family, Verdict]:
    """A verdict per family, in the order of table.families."""
    shared, families = run_findings(table), table.families
    found: dict[Family, Verdict] = {}
    for number, family in enumerate(families):
        if number < MOST_VERDICTS:
            found[family] = judge(table, family, shared)
        else:
            text = f"The report has a verdict for the first {MOST_VERDICTS} of its {len(families)} combinations"
            found[family] = Verdict([f"{text}; `bench explain RUN/ID` explains any trial."], "unknown")
    return found


def headline(table: Table, family: Family | None) -> Verdict:
    points = [point for point in table.of(family) if point.nodes > 1] if family else []
    if points:
        point = headline_point(points)
        found = diagnosis.diagnose(point)
        if found.limit == "wrong-nic":
            return wrong_nic_verdict(*stray_trials(point.trials)[0])
        return Verdict(sentence(point, found, table), found.limit, point, found)
    if strays := stray_trials(table.failed):
        return wrong_nic_verdict(*max(strays, key=lambda pair: pair[0].point.nodes))
    if family is not None:
        return one_node_verdict(family, table)
    if table.failed:
        failed = Part(f"{len(table.failed)}", "failed", len(table.failed), "measured")
        first = words.brief(table.failed[0].error or "no error text was recorded")
        return Verdict(["No verdict yet: all ", failed, f" trials failed. The first: {first}"], "unknown")
    return Verdict(["No verdict yet: the run has no measured trial."], "unknown")


def headline_point(points: list[MergedPoint]) -> MergedPoint:
    """Slowest fabric, most nodes, middle batch: where scaling is hardest, at a typical batch."""
    slowest = min(point.rate_gbps for point in points)
    on_it = [point for point in points if point.rate_gbps == slowest]
    most = max(point.nodes for point in on_it)
    candidates = sorted((point for point in on_it if point.nodes == most), key=lambda point: point.batch)
    return candidates[(len(candidates) - 1) // 2]


def told_apart(point: MergedPoint, table: Table) -> str:
    """What distinguishes the point's family from the others of the run, beside its hardware."""
    return dimensions.label(point.conditions, [name for name in FAMILY if name in table.varying])


def subject(point: MergedPoint, table: Table) -> Pieces:
    family = point.family
    emulated = "emulated " if family.kind == "emulated" else ""
    number, noun = words.count(point.nodes, "node").split(" ")
    per_node = f" of {family.gpus_per_node} {family.device_name}s" if family.gpus_per_node > 1 else ""
    device = "" if per_node else f"{family.device_name} "
    nodes = Part(number, "nodes", point.nodes, "measured")
    with_what = told_apart(point, table)
    place = f"With {with_what} on {point.fabric_label}, " if with_what else f"On {point.fabric_label} "
    return [place, nodes, f" {emulated}{device}{noun}{per_node} "]


def sentence(point: MergedPoint, found: Diagnosis, table: Table) -> Pieces:
    pieces = subject(point, table)
    step, split = point.step_ms.median, point.breakdown
    if found.limit in ("storage", "decode") and split is not None:
        # If all nodes wait for data alike, scaling is perfect: efficiency would hide the problem.
        reads = found.limit == "storage"
        what, thing = ("reading the data", "storage") if reads else ("decoding images on the CPU", "decoding")
        faster = step / (step - split.data_wait)
        pieces += ["keep their accelerators busy ", share("busy", split.compute / step)]
        times = Part(words.significant(faster, 2), "faster", faster, "derived")
        return [*pieces, f" of the time: {what} is the limit; {thing} ", times, " times as fast would feed them."]
    if point.efficiency is None:
        return [*pieces, "were measured, but without a one-node point their efficiency is not known."]
    efficiency = point.efficiency.median
    emulated = point.family.kind == "emulated"
    pieces += ["train at ", share("efficiency", efficiency), " efficiency: "]
    if found.limit == "straggler" and split is not None:
        names = words.several(point.stragglers) if point.stragglers else "a slow node"
        verb, whom = ("are", "them") if len(point.stragglers) > 1 else ("is", "it")
        without = min(1.0, efficiency * step / (step - split.straggler_wait))
        pieces += [f"{names} {verb} the limit; the others wait for {whom} "]
        pieces += [share("straggler_wait", split.straggler_wait / step)]
        pieces += [" of every step, and without that wait it would be ", share("without_straggler", without, "derived")]
    elif found.limit == "compute":
        pieces += ["the accelerators are the limit, as they should be"]
        if 1 - efficiency >= 0.005:
            pieces += ["; a perfect network would add at most ", share("left", 1 - efficiency, "derived")]
    elif found.limit == "host-cpu":
        lead = "the computer that runs the scale model" if emulated else "the host CPU"
        pieces += [f"{lead} is the limit (CPU ", share("host_cpu", (point.host_cpu or 0.0) / 100)]
        pieces += [" busy), not the network", "; these figures are too low" if emulated else ""]
    elif found.limit == "link" and point.link_gbps is not None:
        reached = Part(words.significant(point.link_gbps, 2), "link_gbps", point.link_gbps, "measured")
        rate = Part(words.gbps(point.rate_gbps), "rate_gbps", point.rate_gbps, "configured")
        pieces += ["the link is the limit and delivers only ", reached, " of ", rate]
        pieces += ["; repair it before changing anything else"]
    elif found.limit == "collective" and point.bus_gbps is not None:
        link = point.link_gbps or point.rate_gbps
        pieces += ["the all-reduce is the limit, not the wire; it uses "]
        pieces += [share("link_used", point.bus_gbps.median / link), " of the link"]
        if curve := whatif.curve_for(point):
            full = curve.with_share(0.9 * link / point.rate_gbps)
            pieces += [", and tuned to use 90% would give ", share("tuned", full, "predicted")]
            pieces += [", after which the network is the limit" if full < GOOD else ""]
    elif found.limit == "network":
        pieces += ["the network is the limit", *network_options(point, table)]
    else:
        pieces += ["what limits it was not recorded"]
    return [*pieces, "."]


def network_options(point: MergedPoint, table: Table) -> Pieces:
    """Faster fabrics: measured ones, or else the next common rate as a prediction; then the rate for 80%."""
    same = [
        other
        for other in table.of(point.family)
        if other.nodes == point.nodes and other.group == point.group and other.rate_gbps > point.rate_gbps
    ]
    options: Pieces = []
    for number, other in enumerate(sorted(same, key=lambda other: other.rate_gbps)[:2]):
        if other.efficiency is None:
            continue
        lead = "; " if not options else ", "
        verb = " gives " if number == 0 else " "
        options += [f"{lead}{other.fabric_label}{verb}"]
        options += [share(f"efficiency:{other.fabric}", other.efficiency.median)]
    curve = whatif.curve_for(point, table)
    if curve is None:
        return options
    if not options:
        common = (10.0, 25.0, 100.0, 400.0, 10 * point.rate_gbps)
        faster = next(rate for rate in common if rate >= 2.5 * point.rate_gbps)
        options += [f"; {words.gbps(faster)} would give "]
        options += [share(f"efficiency:{faster:g}", curve.efficiency(faster), "predicted")]
    if point.efficiency is not None and point.efficiency.median < GOOD:
        enough = curve.rate_for(GOOD)
        if enough is None:
            transport = words.TRANSPORTS[curve.setup.transport]
            options += [f", and no link over {transport} alone reaches {words.percent(GOOD)}"]
        elif enough > point.rate_gbps:
            rate = Part(words.gbps(enough), "rate_for_80", enough, "predicted")
            options += [", and about ", rate, f" is enough for {words.percent(GOOD)}"]
    return options


def stray_trials(trials: list[Trial]) -> list[tuple[Trial, Stray]]:
    return [(trial, stray) for trial in trials if (stray := diagnosis.stray_traffic(trial))]


def wrong_nic_verdict(trial: Trial, stray: Stray) -> Verdict:
    fabric = words.fabric(trial.point)
    instead = f" of the bytes went over {stray.interface} instead of {stray.intended}"
    pieces: Pieces = [f"{fabric} was not used: ", share("stray", stray.share)]
    pieces += [f"{instead}, so how it scales on {fabric} is not known."]
    return Verdict(pieces, "wrong-nic", None, stray.diagnose())


def one_node_verdict(family: Family, table: Table) -> Verdict:
    point = max(table.of(family), key=lambda point: point.ips.median)
    emulated = "emulated " if family.kind == "emulated" else ""
    images = Part(words.significant(point.ips.median), "images_per_second", point.ips.median, "measured")
    pieces: Pieces = [f"One {emulated}{family.device_name} node trains {family.model_name} at ", images]
    pieces += [f" images/s at batch {point.batch}; a run with two nodes or more shows how it scales."]
    return Verdict(pieces, "unknown", point, diagnosis.diagnose(point))


@dataclass(frozen=True)
class RunFindings:
    """What is worth saying about a run, whichever family is shown."""

    real_data: list[str]
    unused_fabrics: list[str]
    slow: list[str]
    unsure: list[str]


def run_findings(table: Table) -> RunFindings:
    slow = sorted({name for point in table.points for name in point.stragglers})
    unsure = sum(point.converged is False for point in table.points)
    differ = f"{unsure} of {len(table.points)} emulated points changed by more than 5% at twice the scale factor"
    return RunFindings(
        real_data=real_data(table),
        unused_fabrics=unused_fabrics(table),
        slow=[f"Slow nodes: {words.several(slow)}."] if slow else [],
        unsure=[f"{differ}; they are drawn hollow."] if unsure else [],
    )


def findings(table: Table, verdict: Verdict, shared: RunFindings) -> list[str]:
    """Short facts beside the verdict, most important first."""
    out: list[str] = []
    point = verdict.point
    if verdict.diagnosis is not None and not (point is not None and point.nodes == 1):
        out.append(f"Why: {verdict.diagnosis.reason}. What to change: {verdict.diagnosis.change}.")
    if point is not None and point.nodes > 1 and point.efficiency is not None:
        where = (point.link, point.rate_gbps, point.nodes)
        by_batch = [
            f"{words.percent(other.efficiency.median)} at {other.batch}"
            for other in table.of(point.family)
            if (other.link, other.rate_gbps, other.nodes) == where and other.efficiency is not None
        ]
        if len(by_batch) > 1:
            out.append(
                f"The batch matters: on {point.fabric_label} with {point.nodes} nodes the efficiency is "
                f"{', '.join(by_batch)} images per GPU."
            )
    out += shared.real_data
    out += shared.unused_fabrics if verdict.limit != "wrong-nic" else []
    out += shared.slow if verdict.limit != "straggler" else []
    return [*out, *shared.unsure]


def real_data(table: Table) -> list[str]:
    """Real images against synthetic ones at the same point, largest cluster first; and skipped samples."""

    def key(point: MergedPoint) -> tuple[Any, ...]:
        return (replace(point.family, data="synthetic"), point.link, point.nodes, point.batch)

    out: list[str] = []
    synthetic = {key(point): point for point in table.points if point.family.data == "synthetic"}
    for point in sorted(table.points, key=lambda point: -point.nodes):
        other = synthetic.get(key(point))
        if point.family.data == "synthetic" or other is None or len(out) == MOST_COMPARISONS:
            continue
        wait = point.breakdown.data_wait / point.step_ms.median if point.breakdown else 0.0
        names = [*PLACE, *(name for name in table.varying if name not in ("data", *PLACE))]
        where = dimensions.label(point.conditions, names)
        kept = words.percent(point.ips.median / other.ips.median)
        out.append(
            f"Real data: {words.significant(point.ips.median)} images/s against "
            f"{words.significant(other.ips.median)} synthetic ({kept}) on "
            f"{where}; the accelerators "
            f"wait for images {words.percent(wait)} of the time."
        )
    damage: Counter[str] = Counter()
    for trial in (trial for point in table.points for trial in point.trials):
        damage.update(trial.input.skipped if trial.input else {})
    if damage:
        listed = ", ".join(f"{kind} ({count})" for kind, count in sorted(damage.items()))
        out.append(f"Samples were skipped: {listed}; trials.jsonl names some of them, `bench data verify` finds all.")
    return out


def unused_fabrics(table: Table) -> list[str]:
    found: dict[str, list[Stray]] = defaultdict(list)
    for trial, stray in stray_trials(table.failed):
        found[words.fabric(trial.point)].append(stray)
    return [
        f"{fabric} was not used in {len(strays)} trials: {strays[0].diagnose().reason}."
        for fabric, strays in found.items()
    ]


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
        # A plan lists fabrics as names or as objects with a name.
        listed = [entry.get("name") if isinstance(entry, dict) else entry for entry in planned]
        absent = [name for name in listed if isinstance(name, str) and name and name not in seen]
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
