"""Hours and cost to an accuracy against the number of GPUs: epochs that the batch needs, over the predicted rate."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from bench.parse import PLOT_FORMATS, TRANSPORTS, counts, number, plot_path, transport
from bench.predict import anchors, assumptions
from bench.predict.inputs import DEFAULTS, Parameters, Setup
from bench.predict.step import predict
from bench.sizing import components, costs, epochs
from bench.sizing.costs import Prices
from bench.sizing.epochs import Need, Workload
from cluster.core.errors import UserError
from cluster.core.numbers import COUNT
from cluster.core.tables import columns

# Twice the GPUs do not help when they save less than this share of the time.
WORTHWHILE = 0.1
MOST_GPUS = 16384


@dataclass(frozen=True)
class Answer:
    gpus: int
    global_batch: int
    images_per_second: float
    # None: no published run reached the target at this batch.
    epochs: float | None
    hours: float | None
    hours_low: float | None
    hours_high: float | None
    cost: float | None
    note: str


def configure(parser: argparse.ArgumentParser) -> None:
    components.add_training_arguments(parser)
    option = parser.add_argument
    option("--gpus", default="8,64,512", help="number of GPUs, or a list (default 8,64,512)")
    option("--gpus-per-node", type=COUNT, default=8, help="(default 8)")
    option("--batch", type=COUNT, default=64, help="images per GPU and step (default 64)")
    option("--rate-gbps", default="100", help="rate of one port in Gbit/s, or unknown (default 100)")
    option("--transport", default="tcp", help=f"{', '.join(TRANSPORTS)} (default tcp)")
    option("--target", help="top-1 accuracy in per cent, BERT: masked words (default 75.9 or 72.0)")
    option("--optimizer", choices=("sgd", "lars", "lamb"), help="(default: lars for ResNet-50, lamb for BERT)")
    option("--epochs", help="a schedule of fixed length, whatever it reaches")
    option("--samples", help=f"samples of an epoch, with --epochs (default ImageNet, {epochs.IMAGENET})")
    option("--anchor", metavar="GPUS:RATE[@GBPS]", help="correct the model by your own measurement")
    costs.add_arguments(parser)
    option("--plot", type=plot_path, metavar="FILE", help=f"write hours against GPUs; {PLOT_FORMATS}")


def run(args: argparse.Namespace) -> int:
    via, known = transport(args.transport), costs.from_arguments(args)
    rates = anchors.parse_rates(args.rate_gbps)
    if len(rates) > 1:
        raise UserError("--rate-gbps: give one rate; `bench plan network` compares several")
    workload, samples = _workload(args)
    if workload and workload.seq_len:
        if args.seq_len not in (None, workload.seq_len):
            raise UserError(f"--seq-len: the data behind the target have {workload.seq_len}; or give --epochs")
        args.seq_len = workload.seq_len
    fixed = number(args.epochs, "--epochs") if args.epochs else None

    def ask(gpus: int) -> Answer:
        setup = components.setup(args, args.batch, gpus, args.gpus_per_node, rates[0], via)
        return answer(setup, workload, fixed, samples, known, _parameters(args, setup, rates))

    answers = [ask(gpus) for gpus in counts(args.gpus, "--gpus")]
    if all(one.hours is None for one in answers):
        raise UserError(f"--gpus: {answers[0].note}; use fewer GPUs or a smaller --batch, or give --epochs")
    enough = _enough(ask, args.gpus_per_node)
    curve = epochs.curve(workload) if workload and fixed is None else None
    if args.json:
        described = asdict(curve) if curve else None
        print(
            json.dumps(
                {"answers": [asdict(one) for one in answers], "curve": described, "enough_gpus": enough.gpus}, indent=2
            )
        )
    else:
        print(_head(args, workload, fixed, samples))
        some = components.setup(args, args.batch, args.gpus_per_node, args.gpus_per_node, rates[0], via)
        rate = f"{rates[0]:g} Gbit/s" if rates[0] else "a network of unknown rate"
        print(f"{assumptions.text([some])}; {rate} over {via}")
        print(_as_text(answers, "samples" if workload and workload.samples == 1 else "epochs"))
        beyond = curve is not None and enough.gpus * args.batch > curve.largest
        print(f"{enough.text}, extrapolated beyond a batch of {curve.largest:,}" if curve and beyond else enough.text)
    if args.plot:
        from bench.sizing.accuracy_plot import draw

        setup = components.setup(args, args.batch, args.gpus_per_node, args.gpus_per_node, rates[0], via)
        asked = {one.gpus for one in answers}
        sizes = asked.union(_doublings(args.gpus_per_node, max(asked)))
        draw([ask(gpus) for gpus in sorted(sizes)], setup, workload, args.plot)
    return 0


def _workload(args: argparse.Namespace) -> tuple[Workload | None, float]:
    samples = number(args.samples, "--samples") if args.samples else float(epochs.IMAGENET)
    if args.epochs:
        return None, samples
    if args.samples:
        raise UserError("--samples: needs --epochs; the data behind a target have their own")
    optimizer = args.optimizer or epochs.DEFAULT_OPTIMIZER.get(args.model, "sgd")
    target = number(args.target, "--target") if args.target else epochs.DEFAULT_TARGET.get(args.model, 100.0)
    found = epochs.choose(args.model, optimizer, target)
    return found, float(found.samples if found else epochs.IMAGENET)


def _parameters(args: argparse.Namespace, setup: Setup, rates: Sequence[float | None]) -> Parameters:
    return anchors.parameters(anchors.parse(args.anchor, rates), setup) if args.anchor else DEFAULTS


def answer(
    setup: Setup, workload: Workload | None, fixed: float | None, samples: float, known: Prices, parameters: Parameters
) -> Answer:
    got = predict(setup, parameters)
    batch = setup.images_per_step
    need: Need | None
    if fixed is not None:
        need, note = Need(fixed, fixed, fixed, True), ""
    elif workload is None:
        need = epochs.fixed(batch)
        note = "" if need else f"no data for SGD at a batch of {batch:,}, at most {epochs.SGD_BATCH:,}"
    else:
        curve = epochs.curve(workload)
        need = curve.need(batch)
        note = "" if need.inside else f"extrapolated: published batches are {curve.smallest:,} to {curve.largest:,}"
    if need is None:
        return Answer(setup.gpus, batch, got.images_per_second, None, None, None, None, None, note)
    hours = need.epochs * samples / got.images_per_second / 3600
    # Epochs and rate are independent.
    slower = math.hypot(math.log(got.images_per_second / got.low), math.log(need.high / need.epochs))
    faster = math.hypot(math.log(got.high / got.images_per_second), math.log(need.epochs / need.low))
    low, high = hours * math.exp(-faster), hours * math.exp(slower)
    cost = hours * known.per_hour(setup)
    return Answer(setup.gpus, batch, got.images_per_second, need.epochs, hours, low, high, cost, note)


def _doublings(first: int, last: int) -> list[int]:
    found = [first]
    while found[-1] < last:
        found.append(2 * found[-1])
    return found


@dataclass(frozen=True)
class Enough:
    """The number of GPUs beyond which twice as many save too little, or beyond which nothing is known."""

    gpus: int
    text: str


def _enough(ask: Callable[[int], Answer], per_node: int) -> Enough:
    sizes = _doublings(per_node, MOST_GPUS)
    known = [one.hours for one in map(ask, sizes) if one.hours is not None]
    # From one node to two a slow network may lose what more nodes win again, so the last gain counts.
    gains = [index for index, (one, two) in enumerate(pairwise(known)) if two <= (1 - WORTHWHILE) * one]
    last = gains[-1] + 1 if gains else 0
    if last < len(known) - 1:
        return Enough(sizes[last], f"more than {sizes[last]:,} GPUs save less than {WORTHWHILE:.0%} when doubled")
    if len(known) < len(sizes):
        return Enough(sizes[last], f"no data for more than {sizes[last]:,} GPUs with this batch per GPU")
    return Enough(MOST_GPUS, f"doubling helps up to {MOST_GPUS:,} GPUs")


def _head(args: argparse.Namespace, workload: Workload | None, fixed: float | None, samples: float) -> str:
    if fixed is not None:
        return f"{fixed:g} epochs of {samples:,.0f} samples"
    if workload is None:
        return f"SGD: {epochs.SGD_EPOCHS:g} epochs, published up to a batch of {epochs.SGD_BATCH:,}"
    curve = epochs.curve(workload)
    what = "epochs" if workload.samples > 1 else "samples"
    length = f", sequences of {workload.seq_len}" if workload.seq_len else ""
    return (
        f"{workload.name}{length}, {workload.rows_optimizer}, target {workload.target:g}: {what} = {curve.least:.4g} x "
        f"(1 + batch / {curve.noise_batch:,.0f}), from {curve.points} batches of {curve.smallest:,} to "
        f"{curve.largest:,}; each left out in turn: mean error {curve.mean_error:.1%}"
    )


def _as_text(answers: Sequence[Answer], what: str) -> str:
    cells = []
    for one in answers:
        shown = ("-", "-", "-", "-")
        digits = 2 if (one.hours or 1.0) >= 1 else 3
        if one.hours is not None and one.hours_low is not None and one.hours_high is not None:
            count = f"{one.epochs:.1f}" if (one.epochs or 0) < 1e4 else f"{one.epochs:.4g}"
            times = [f"{hours:.{digits}f}" for hours in (one.hours, one.hours_low, one.hours_high)]
            shown = (count, times[0], f"{times[1]} to {times[2]}", f"{one.cost:,.0f}")
        cells.append((one.gpus, f"{one.global_batch:,}", f"{one.images_per_second:.0f}", *shown, one.note))
    return columns(("gpus", "batch", "samples/s", what, "hours", "80% interval", "USD", ""), cells)
