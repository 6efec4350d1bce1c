"""Where to cut a model for several devices, and whether that beats data parallelism.

Examples:
  bench plan placement --model vgg16 --gpu p100 --devices 4 --rate-gbps 10
  bench plan placement --model gpt2-medium --single-rate 12 --batch 4 --devices 8 --gpus-per-node 4 --stages 4
  bench plan placement --model bert-large --gpu a100 --batch 16 --devices 4 --schedule gpipe --memory-gb 40
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from bench import words
from bench.catalogue import gpu_rates, models
from bench.parse import TRANSPORTS, number, transport
from bench.plan import stages
from bench.predict import memory, split
from bench.predict.inputs import DEFAULTS, INTERCONNECTS, Setup, precision, single_step
from bench.predict.split import Pipeline, Split
from cluster.core.errors import UserError
from cluster.core.numbers import COUNT, POSITIVE
from cluster.core.tables import columns

# Links, in Gbit/s, at which the methods are compared.
RATES = (1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 56.0, 100.0, 200.0, 400.0)
NAMES = {
    "data": "data parallel (Horovod)",
    "fsdp": "sharded weights (FSDP)",
    "pipeline": "pipeline",
    "tensor": "split layers (tensor)",
    "spatial": "tiles of the image (spatial)",
}


@dataclass(frozen=True)
class Winner:
    """The fastest method from a link rate on, and what it gains against data parallelism there."""

    from_gbps: float
    method: str
    speed_up: float


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (__doc__ or "").split("\n\n", 1)[1]
    option = parser.add_argument
    option("--model", default="resnet50", help=f"{', '.join(models.NAMES)} (default resnet50)")
    option("--devices", type=COUNT, default=4, help="number of devices (default 4)")
    option("--stages", type=COUNT, help="stages of a pipeline; devices / stages replicas of it (default: all devices)")
    option("--gpus-per-node", type=COUNT, default=1, help="devices per node (default 1)")
    option("--batch", type=COUNT, default=64, help="samples per device and step; all methods process the same")
    option("--micro-batches", type=COUNT, help="parts of a pipeline's samples per step (default: up to four per stage)")
    option("--schedule", choices=stages.SCHEDULES, default="1f1b", help="order of a pipeline's work (default 1f1b)")
    option("--memory-gb", type=POSITIVE, help="memory of a device; no stage may need more")
    option("--optimizer", choices=tuple(memory.OPTIMIZERS), default="sgd", help="for the memory (default sgd)")
    option(
        "--gpu", help=f"device profile: {', '.join(gpu_rates.PROFILES)} (default p100, if there is no --single-rate)"
    )
    option("--precision", help="fp32, tf32, amp or fp16, where published (default: the GPU's usual one)")
    option("--single-rate", type=POSITIVE, help="measured samples/s of one device, at the given --batch")
    option("--seq-len", type=COUNT, help="words per sequence of a language model")
    option("--rate-gbps", default="10", help="link rate of one node in Gbit/s (default 10)")
    option("--transport", default="tcp", help=f"{', '.join(TRANSPORTS)} (default tcp)")
    option("--interconnect", choices=INTERCONNECTS, default="auto", help="link between a node's devices")


def run(args: argparse.Namespace) -> int:
    rate, via = number(args.rate_gbps, "--rate-gbps"), transport(args.transport)
    gpu = args.gpu or (None if args.single_rate else "p100")
    if args.stages is not None and (args.stages > args.devices or args.devices % args.stages):
        raise UserError(f"--stages: {args.stages} does not divide --devices {args.devices}")
    models.get(args.model, args.seq_len)
    stages.check_stages(args.model, args.stages or args.devices, "--stages" if args.stages else "--devices")
    step, source, doubt = single_step(args.model, args.batch, gpu, args.precision, args.single_rate, args.seq_len)
    setup = Setup(
        args.model,
        args.batch,
        step,
        args.devices,
        args.gpus_per_node,
        rate,
        via,
        interconnect=args.interconnect,
        gpu=gpu,
        compute_doubt=doubt,
        seq_len=args.seq_len,
        precision=precision(args.precision, args.single_rate, gpu, args.model, args.seq_len),
    )
    options = {
        "depth": args.stages,
        "count": args.micro_batches,
        "schedule": args.schedule,
        "memory_gb": args.memory_gb,
    }
    found = split.ways(setup, DEFAULTS, args.optimizer, **options)
    won = winners(setup, args.optimizer, args.memory_gb, options) if setup.nodes > 1 else []
    if args.json:
        print(json.dumps(_as_json(setup, source, found, won), indent=2))
    else:
        print(_as_text(setup, source, found, won, args.memory_gb))
    return 0


def winners(setup: Setup, optimizer: str, limit: float | None, options: dict[str, Any]) -> list[Winner]:
    """The fastest method that fits the memory, by link rate; neighbours with the same one are merged."""
    each: list[Winner] = []
    for rate in RATES:
        at = split.at_rate(setup, rate)
        found = split.ways(at, DEFAULTS, optimizer, **options)
        best = min((one for one in found if limit is None or one.memory_gb <= limit), key=lambda one: one.step_ms)
        each.append(Winner(rate, best.method, found[0].step_ms / best.step_ms))
    return [next(same) for _, same in groupby(each, key=lambda one: one.method)]


def _pipeline(found: Sequence[Split]) -> Pipeline:
    return next(one for one in found if isinstance(one, Pipeline))


def _as_json(setup: Setup, source: str, found: Sequence[Split], won: Sequence[Winner]) -> dict[str, Any]:
    pipe = _pipeline(found)
    base = found[0]
    values = split.element_bytes(setup)
    return {
        "model": setup.model,
        "devices": setup.gpus,
        "batch": setup.batch,
        "rate_gbps": setup.rate_gbps,
        "single_step_ms": setup.single_step_ms,
        "single_rate_source": source,
        "schedule": pipe.schedule,
        "replicas": setup.gpus // len(pipe.cut),
        "micro_batches": pipe.micro_batches,
        "micro_batch": pipe.micro_batch,
        "bubble": split.idle_share(len(pipe.cut), pipe.micro_batches),
        "idle_share": pipe.bubble,
        "stages": [
            {
                "layers": list(part.names),
                "compute_ms": work,
                "share": part.share,
                "parameters": part.parameters,
                "memory_gb": held,
                "sends_bytes": part.sends * pipe.micro_batch * values,
                "sends_ms": edge,
            }
            for part, work, held, edge in zip(pipe.cut, pipe.stage_ms, pipe.stage_gb, (*pipe.edge_ms, 0.0), strict=True)
        ],
        "methods": [
            {
                "method": one.method,
                "step_ms": one.step_ms,
                "samples_per_second": one.samples_per_second(setup),
                "speed_up": base.step_ms / one.step_ms,
                "sent_bytes": one.sent_bytes,
                "memory_gb": one.memory_gb,
            }
            for one in found
        ],
        "fastest": [asdict(one) for one in won],
    }


def _as_text(setup: Setup, source: str, found: Sequence[Split], won: Sequence[Winner], limit: float | None) -> str:
    pipe, base, values = _pipeline(found), found[0], split.element_bytes(setup)
    unit, deep = setup.network.unit, len(pipe.cut)
    one_unit = unit if pipe.micro_batch > 1 else unit.removesuffix("s")
    replicas = setup.gpus // deep
    beside = f", {words.count(replicas, 'replica')}" if replicas > 1 else ""
    lines = [
        f"one device: {setup.single_images_per_second:.1f} {unit}/s ({source})",
        f"{setup.model} in {words.count(deep, 'stage')}{beside}, {pipe.schedule}, "
        f"micro-batches of {pipe.micro_batch} {one_unit}, {pipe.micro_batches} per step:",
        "",
    ]
    rows = [
        (
            at,
            part.label,
            f"{work:.1f}",
            words.percent(part.share),
            words.significant(4 * part.parameters / 1e6),
            f"{held:.1f}",
            words.significant(part.sends * pipe.micro_batch * values / 1e6) if part.sends else "-",
            f"{edge:.1f}" if part.sends else "-",
        )
        for at, (part, work, held, edge) in enumerate(
            zip(pipe.cut, pipe.stage_ms, pipe.stage_gb, (*pipe.edge_ms, 0.0), strict=True), start=1
        )
    ]
    head = ("stage", "layers", "compute ms", "share", "weights MB", "memory GB", "sends MB", "sends ms")
    bubble = split.idle_share(deep, pipe.micro_batches)
    lines += [
        columns(head, rows),
        "",
        f"compute and sends are those of one micro-batch. Bubble: {words.percent(bubble)} of the time with equal "
        f"stages; stages idle {words.percent(pipe.bubble)} of it with this cut and these links.",
    ]
    if shared := max(part.shares_parameters for part in pipe.cut):
        size = words.significant(setup.gradient_bytes * shared / 1e6)
        lines.append(f"First and last stage both hold the word embedding: they add up {size} MB of gradients per step.")
    where = f"at {words.gbps(setup.rate_gbps or 0)}" if setup.nodes > 1 else "on one node"
    lines += ["", f"The same {setup.images_per_step} {unit} per step on {setup.gpus} devices {where} (predicted):"]
    cells = [
        (
            NAMES[one.method],
            f"{one.samples_per_second(setup):.1f}",
            f"x{base.step_ms / one.step_ms:.2f}",
            f"{one.step_ms:.1f}",
            words.significant(one.sent_bytes / 1e6),
            f"{one.memory_gb:.1f}" + (" (too much)" if limit is not None and one.memory_gb > limit else ""),
        )
        for one in found
    ]
    names = ("method", f"{unit}/s", "against data", "step ms", "sends MB/device", "memory GB")
    lines.append(columns(names, cells))
    if won:
        ranges = []
        for at, one in enumerate(won):
            until = f" until {won[at + 1].from_gbps:g}" if at + 1 < len(won) else " on"
            gain = f" (x{one.speed_up:.2f})" if one.method != "data" else ""
            ranges.append(f"from {one.from_gbps:g}{until} Gbit/s: {NAMES[one.method]}{gain}")
        fits = " of those that fit the memory" if limit is not None else ""
        lines += ["", f"Fastest{fits}: {'; '.join(ranges)}."]
    return "\n".join(lines)
