"""Hours and cost of training on a data set, from the predicted rate."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from bench.parse import TRANSPORTS, counts, number, transport
from bench.predict import assumptions
from bench.predict.inputs import Setup, single_step
from bench.predict.step import predict
from bench.sizing import components, costs
from bench.sizing.components import add_training_arguments
from bench.sizing.costs import Prices
from bench.sizing.transfer import readable
from cluster.core.numbers import COUNT
from cluster.core.tables import columns

# ImageNet: 138 GB of JPEG for 1.28 million images.
IMAGE_KB = 108.0


@dataclass(frozen=True)
class Projection:
    gpus: int
    images_per_second: float
    efficiency: float
    hours: float
    hours_low: float
    hours_high: float
    cost: float


def project(setup: Setup, images: float, epochs: float, known: Prices) -> Projection:
    """Hours = images x epochs / rate; cost = hours x (GPUs x GPU + nodes x (node + port))."""
    got = predict(setup)
    work = images * epochs / 3600
    hours = work / got.images_per_second
    cost = hours * known.per_hour(setup)
    return Projection(setup.gpus, got.images_per_second, got.efficiency, hours, work / got.high, work / got.low, cost)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset-tb", required=True, help="size of the data set in TB")
    parser.add_argument("--image-kb", default=str(IMAGE_KB), help=f"mean size of an image (default {IMAGE_KB:g})")
    parser.add_argument("--batch", type=COUNT, default=64, help="images per GPU and step (default 64)")
    add_training_arguments(parser)
    parser.add_argument("--gpus", default="1", help="number of GPUs, or a list; one GPU is always shown")
    parser.add_argument("--gpus-per-node", type=COUNT, default=8, help="(default 8)")
    parser.add_argument("--rate-gbps", default="10", help="link rate of one node in Gbit/s (default 10)")
    parser.add_argument("--transport", default="tcp", help=f"{', '.join(TRANSPORTS)} (default tcp)")
    parser.add_argument("--epochs", default="90", help="passes over the data (default 90)")
    costs.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    size = number(args.dataset_tb, "--dataset-tb")
    kilobytes = number(args.image_kb, "--image-kb")
    epochs = number(args.epochs, "--epochs")
    rate = number(args.rate_gbps, "--rate-gbps")
    known = costs.from_arguments(args)
    via = transport(args.transport)
    batch, per_node = args.batch, args.gpus_per_node
    step, source, _ = single_step(args.model, batch, args.gpu, args.precision, args.single_rate, args.seq_len)
    images = size * 1e9 / kilobytes
    sizes = dict.fromkeys([1, *counts(args.gpus, "--gpus")])
    setups = [components.setup(args, batch, gpus, per_node, rate, via) for gpus in sizes]
    found = [project(setup, images, epochs, known) for setup in setups]
    if args.json:
        answer = {
            "inputs": {
                "dataset_tb": size,
                "image_kb": kilobytes,
                "images": images,
                "epochs": epochs,
                "model": args.model,
                "single_rate": 1000 * batch / step,
                "single_rate_source": source,
                "gpu_hour": known.gpu,
                "node_hour": known.node,
                "rate_gbps": rate,
                "gpus_per_node": per_node,
            },
            "projections": [asdict(one) for one in found],
        }
        print(json.dumps(answer, indent=2))
        return 0
    print(
        f"{size:g} TB / {kilobytes:g} KB = {images / 1e6:.1f} million images, {epochs:g} epochs; "
        f"{known.gpu:g} USD per GPU hour, {known.node:g} per node hour"
    )
    print(f"one GPU: {1000 * batch / step:.1f} images/s ({source})")
    print(f"{assumptions.text(setups)}; {rate:g} Gbit/s over {via}")
    print("hours = images x epochs / rate; cost = hours x (GPUs x GPU + nodes x (node + port))\n")
    cells = []
    for one in found:
        time = readable(3600 * one.hours), f"{one.hours:.1f}", f"{one.hours_low:.1f} to {one.hours_high:.1f}"
        cells.append((one.gpus, f"{one.images_per_second:.1f}", f"{one.efficiency:.3f}", *time, f"{one.cost:,.0f}"))
    print(columns(("gpus", "images/s", "efficiency", "time", "hours", "80% interval", "USD"), cells))
    return 0
