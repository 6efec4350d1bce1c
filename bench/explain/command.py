"""Name the weakest link of a run or a trial, the next one, and the change that gains most."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import words
from bench.explain import diagnosis, recurrent, roofline, verdict, weakest_link, whatif
from bench.explain.diagnosis import LINK_FULL, Diagnosis
from bench.parse import PLOT_FORMATS, counts, plot_path
from bench.results.points import MergedPoint
from bench.results.runs import Run, find_trial, load
from bench.results.trial import Trial
from cluster.core.errors import InfraError, UserError
from cluster.core.tables import columns

COMMON_RATES = (1.0, 10.0, 25.0, 40.0, 100.0, 200.0, 400.0, 800.0)


def configure(parser: argparse.ArgumentParser) -> None:
    target = "a run folder, latest, a trial id, or RUN/ID"
    parser.add_argument("target", metavar="RUN|TRIAL", nargs="?", default="latest", help=target)
    capacity = "capacity of a stage per node, such as storage=200MB/s or decode=180images/s"
    parser.add_argument("--capacity", metavar="NAME=VALUE", action="append", default=[], help=capacity)
    layer = "explain a recurrent layer instead of a run: rnn, gru or lstm and its hidden units, such as lstm:1024"
    parser.add_argument("--roofline", metavar="LAYER", help=layer)
    sizes = ",".join(map(str, recurrent.BATCHES))
    parser.add_argument("--batch", metavar="LIST", help=f"sequences per time step, for --roofline (default {sizes})")
    parser.add_argument("--gpu", help="device for the roofline, if the trial does not name one (LAYER: default p100)")
    parser.add_argument("--plot", type=plot_path, metavar="FILE", help=f"write the roofline; {PLOT_FORMATS}")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


@dataclass(frozen=True)
class Change:
    what: str
    images_per_second: float
    gain: float
    source: str


def run(args: argparse.Namespace) -> int:
    if args.roofline is not None:
        return explain_layer(args)
    if args.batch is not None:
        raise UserError("--batch: only --roofline LAYER has batches to choose; remove it")
    given = dict(weakest_link.parse_capacity(text) for text in args.capacity)
    found = find_trial(args.target)
    report = explain_trial(*found, given, args.gpu) if found else explain_run(load(args.target), given, args.gpu)
    if args.plot is not None:
        draw(report.get("trial"), found[0] if found else load(args.target), args.gpu, args.plot)
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 0


def explain_layer(args: argparse.Namespace) -> int:
    cell, device = recurrent.parse(args.roofline), recurrent.chip(args.gpu or "p100")
    batches = counts(args.batch, "--batch") if args.batch is not None else recurrent.BATCHES
    report = recurrent.explain(cell, device, batches)
    if args.plot is not None:
        try:
            recurrent.draw(cell, device, batches, args.plot)
        except OSError as error:
            raise InfraError(f"--plot: cannot write {args.plot}: {error.strerror}") from error
    print(json.dumps(report, indent=2) if args.json else recurrent.as_text(report))
    return 0


def draw(trial: str | None, run: Run, gpu: str | None, path: Path) -> None:
    point = next((point for point in run.table().points if point.trials[0].id == trial), None)
    roof = roofline.roofline(point, gpu) if point is not None else None
    if point is None or roof is None:
        raise UserError(f"--plot: no roofline for this trial; name the device with --gpu ({', '.join(roofline.PEAKS)})")
    try:
        roofline.draw(roof, point, path)
    except OSError as error:
        raise InfraError(f"--plot: cannot write {path}: {error.strerror}") from error


def explain_run(run: Run, given: dict[str, Any] | None = None, gpu: str | None = None) -> dict[str, Any]:
    """Explain the point of the report's verdict."""
    table = run.table()
    judged = verdict.judge(table)
    report: dict[str, Any] = {"run": run.name, "verdict": judged.sentence, "missing": verdict.missing(run, table)}
    if judged.point is not None:
        return report | explain_point(judged.point, {**run.capacities, **(given or {})}, gpu)
    if not run.trials:
        raise UserError(f"RUN: {run.name} holds no trial to explain; run `make bench` first")
    return report | explain_failed(next(filter(diagnosis.stray_traffic, table.failed), run.trials[0]))


def explain_trial(
    run: Run, trial: Trial, given: dict[str, Any] | None = None, gpu: str | None = None
) -> dict[str, Any]:
    report: dict[str, Any] = {"run": run.name, "missing": run.problems}
    if trial.status == "failed":
        return report | explain_failed(trial)
    point = next((p for p in run.table().points if any(t.id == trial.id for t in p.trials)), None)
    if point is None:
        raise UserError(f"TRIAL: {trial.id} has no step time, so there is nothing to explain")
    return report | explain_point(point, {**run.capacities, **(given or {})}, gpu)


def explain_failed(trial: Trial) -> dict[str, Any]:
    if stray := diagnosis.stray_traffic(trial):
        found = stray.diagnose()
    else:
        where = f" on {trial.error_node}" if trial.error_node else ""
        why = f"the trial failed{where}: {trial.error or 'no error was recorded'}"
        found = Diagnosis("unknown", why, "repair and rerun")
    evidence = []
    if trial.traffic is not None:
        for node, sent in trial.traffic.measured_bytes.items():
            others = trial.traffic.other_bytes.get(node, {})
            evidence.append({"node": node, "interfaces": {trial.traffic.interface: sent, **others}})
    return {
        "trial": trial.id,
        "point": describe(trial),
        "kind": trial.kind,
        **asdict(found),
        "bytes_per_step": evidence,
    }


def describe(trial: Trial) -> str:
    point = trial.point
    more = [text for text in (point.compression, point.data) if text not in ("none", "synthetic")]
    return (
        f"{point.model}, {point.device}, {words.fabric(point)}, {words.count(point.nodes, 'node')} x "
        f"{', '.join([f'{point.gpus_per_node}, batch {point.batch}, {point.engine}', *more])}"
    )


def explain_point(point: MergedPoint, capacities: dict[str, Any], gpu: str | None = None) -> dict[str, Any]:
    found = diagnosis.diagnose(point)
    chain = weakest_link.stages(point, capacities, found.limit)
    observed = point.ips.median
    cut = weakest_link.minimum_cut(chain, point.nodes)
    after = weakest_link.minimum_cut(weakest_link.without(chain, cut.stages), point.nodes) if cut else None
    roof = roofline.roofline(point, gpu)
    return {
        "trial": point.trials[0].id,
        "point": describe(point.trials[0]),
        "kind": point.family.kind,
        "images_per_second": observed,
        "efficiency": point.efficiency.median if point.efficiency else None,
        **asdict(found),
        "step_ms": point.breakdown.model_dump() if point.breakdown else None,
        "path": [stage.as_json(observed) for stage in chain],
        "weakest": cut.as_json() if cut else None,
        "next": after.as_json() if after else None,
        "note": overlap_note(point, cut),
        "changes": [asdict(change) for change in changes(point, found.limit, chain)],
        "roofline": roof.as_json() if roof else None,
    }


def overlap_note(point: MergedPoint, cut: weakest_link.Cut | None) -> str | None:
    """Why the flow is below the cut: compute and communication take turns if they do not overlap."""
    if cut is None or point.ips.median >= 0.85 * cut.images_per_second or point.breakdown is None:
        return None
    shown = words.significant(point.breakdown.exposed_comm)
    return (
        f"No link is full: the weakest would allow {words.significant(cut.images_per_second)} images/s. Compute and "
        f"communication take turns instead of overlapping ({shown} ms of communication is exposed in every step)."
    )


INPUT, NETWORK, COMPUTE = ("storage", "share", "decode", "pcie"), ("fabric", "allreduce"), ("accelerator", "barrier")


def changes(point: MergedPoint, limit: str, chain: list[weakest_link.Stage]) -> list[Change]:
    """The gain of each change alone, best first. None exceeds the minimum cut of the stages that it leaves alone."""
    out: list[Change] = []
    now, step, parts = point.ips.median, point.step_ms.median, point.breakdown
    # A saturated host distorts every part of the step, so a prediction from it would be wrong.
    if parts is None or limit == "host-cpu":
        return out

    def add(what: str, changed: tuple[str, ...], images: float, source: str = "predicted") -> None:
        cut = weakest_link.minimum_cut(weakest_link.without(chain, changed), point.nodes)
        images = min(images, cut.images_per_second) if cut else images
        if images > now * 1.005:
            out.append(Change(what, images, images / now, source))

    if parts.data_wait > 0:
        add("images always ready (faster storage or decoding)", INPUT, now * step / (step - parts.data_wait), "derived")
    if parts.straggler_wait > 0:
        who = words.several(point.stragglers) if point.stragglers else "the slow node"
        add(f"{who} as fast as the others", COMPUTE, now * step / (step - parts.straggler_wait), "derived")
    curve = whatif.curve_for(point)
    if curve is not None and point.ideal is not None:
        rate = next((rate for rate in COMMON_RATES if rate >= 2 * point.rate_gbps), 2 * point.rate_gbps)
        add(
            f"{words.gbps(rate)} instead of {words.gbps(point.rate_gbps)}",
            NETWORK,
            point.ideal * curve.efficiency(rate),
        )
        if point.family.compression == "none":
            add("fp16 gradients (half the bytes)", NETWORK, point.ideal * curve.with_compression("fp16"))
        link = point.link_gbps or point.rate_gbps
        if point.bus_gbps and point.bus_gbps.median < LINK_FULL * link:
            tuned = 0.9 * link / point.rate_gbps
            add("an all-reduce that uses 90% of the link", NETWORK, point.ideal * curve.with_share(tuned))
    faster = curve.faster_device(2) if curve is not None else step - parts.compute / 2
    add("accelerators twice as fast", COMPUTE, now * step / faster)
    return sorted(out, key=lambda change: -change.gain)


def as_text(report: dict[str, Any]) -> str:
    lines = []
    if "verdict" in report:
        lines += [report["verdict"], ""]
    emulated = " (emulated)" if report.get("kind") == "emulated" else ""
    lines.append(f"Trial {report['trial']}: {report['point']}{emulated}")
    limit = diagnosis.LIMITS[report["limit"]]
    lines.append(f"Limit: {limit}: {report['reason']}.")
    if report.get("path"):
        cut = (report["weakest"] or {}).get("stages", [])
        rows = [
            (
                stage["label"],
                words.significant(stage["images_per_second"]) if stage["images_per_second"] else "-",
                words.percent(stage["use"]) if stage["use"] is not None else "-",
                stage["source"],
                stage["detail"] + ("  <- weakest" if stage["stage"] in cut else ""),
            )
            for stage in report["path"]
        ]
        lines += ["", columns(("stage", "images/s", "use", "source", "detail"), rows), ""]
    for title, key in (("Weakest link (minimum cut)", "weakest"), ("Next after fixing it", "next")):
        if report.get(key):
            found = report[key]
            lines.append(f"{title}: {found['label']}, at most {words.significant(found['images_per_second'])} images/s")
    if report.get("note"):
        lines.append(report["note"])
    lines.append(f"What to do: {report['change']}.")
    if report.get("changes"):
        lines += ["", "What each change alone would give, best first:"]
        gains = [
            (f"x{one['gain']:.2f}", words.significant(one["images_per_second"]), one["source"], one["what"])
            for one in report["changes"]
        ]
        lines.append(columns(("gain", "images/s", "source", "change"), gains))
    if report.get("roofline"):
        roof = report["roofline"]
        lines += [
            "",
            f"Roofline on {roof['device']} ({roof['peak']}, {roof['memory_gbs']} GB/s): about "
            f"{words.significant(roof['flop_per_byte'], 2)} FLOP per byte moved, ridge at "
            f"{words.significant(roof['ridge_flop_per_byte'], 2)}: {roof['bound']}-bound;",
            f"reaches {words.significant(roof['achieved_tflops'])} of {words.significant(roof['roof_tflops'])} TFLOP/s "
            f"({words.percent(roof['share'])} of the roof). {roof['source'].capitalize()}.",
        ]
    for node in report.get("bytes_per_step", []):
        sent = ", ".join(f"{name} {words.significant(value / 1e6)} MB" for name, value in node["interfaces"].items())
        lines.append(f"  {node['node']} sent per step: {sent}")
    for text in report.get("missing", []):
        lines.append(f"Missing: {text}")
    return "\n".join(lines)
