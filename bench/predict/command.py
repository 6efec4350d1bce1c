"""Predict throughput and scaling efficiency of a cluster, with an interval of uncertainty.

Examples:
  bench predict --model resnet50 --batch 64 --single-rate 253.1 --gpus 32 --gpus-per-node 4 --rate-gbps 10
  bench predict --gpu v100 --gpus 1,4,8,16,32,64 --gpus-per-node 4 --rate-gbps 1,10,100 --plot scaling.svg
  bench predict --single-rate 253.1 --anchor 8:1282.3 --overlap none --gpus 32 --gpus-per-node 4 --rate-gbps 10
  bench predict --model bert-large --seq-len 512 --batch 16 --gpu a100 --gpus 64 --gpus-per-node 8 --rate-gbps 200
  bench predict --torch train:make_model --model-file my-model.csv
  bench predict --model-file my-model.csv --single-rate 120 --gpus 8,32 --gpus-per-node 8 --rate-gbps 25
  bench predict --calibrate results/local/latest --gpus 10,1024
  bench predict --validate
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import words
from bench.catalogue import gpu_rates, models
from bench.parse import PLOT_FORMATS, TRANSPORTS, counts, named_path, plot_path, transport
from bench.predict import anchors, assumptions, memory
from bench.predict.inputs import (
    COLLECTIVES,
    COMPRESSIONS,
    DEFAULTS,
    ENGINES,
    INTERCONNECTS,
    LINK_HELP,
    LINKS,
    OVERLAPS,
    PLACEMENTS,
    Parameters,
    Setup,
    precision,
    single_step,
)
from bench.predict.json_values import as_object, rounded
from bench.predict.network import link_gbps
from bench.predict.step import Prediction, predict
from cluster.core.errors import UserError
from cluster.core.numbers import COUNT, POSITIVE, Number
from cluster.core.tables import columns

# Options that are fields of Setup under the same name.
SETUP_OPTIONS = (
    *("gpus_per_node", "transport", "engine", "compression", "fusion_mb", "cycle_ms", "overlap", "interconnect"),
    *("link", "hierarchical", "gpu", "servers", "seq_len", "grad_accum", "collective", "nics", "placement", "period"),
)


@dataclass(frozen=True)
class Row:
    """One line of the answer: a configuration and its prediction."""

    label: str
    setup: Setup
    prediction: Prediction
    link_gbps: float | None
    single_source: str

    def as_json(self) -> dict[str, Any]:
        asked = asdict(self.setup)
        doubt = asked.pop("compute_doubt")
        return {
            **asked,
            "nodes": self.setup.nodes,
            "intra": self.setup.intra,
            "single_rate": rounded(self.setup.single_images_per_second),
            "single_rate_source": self.single_source,
            "single_rate_doubt": doubt,
            "series": self.label,
            "link_gbps": rounded(self.link_gbps),
            **as_object(self.prediction),
        }


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (__doc__ or "").split("\n\n", 1)[1]
    option = parser.add_argument
    models.add_arguments(parser)
    text = "read a torch model's layers into --model-file; needs torch, so run it in your venv or on the head"
    option("--torch", metavar="PACKAGE.MODULE:FACTORY", help=text)
    option("--batch", type=COUNT, help="images or sequences per GPU and micro-batch (default 64)")
    option("--seq-len", type=COUNT, help="words per sequence of a language model")
    option("--grad-accum", type=COUNT, default=1, help="micro-batches per update (default 1)")
    option("--gpu", help=f"device profile: {', '.join(gpu_rates.PROFILES)}")
    text = "fp32, tf32, amp (all three send gradients of 4 bytes) or fp16 (2 bytes); default: the GPU's usual one"
    option("--precision", help=text)
    option("--single-rate", type=POSITIVE, help="measured images/s of one GPU; overrides the profile")
    option("--gpus", help="total number of GPUs, or a list such as 1,4,8,32")
    option("--gpus-per-node", type=COUNT, default=1, help="(default 1)")
    option("--rate-gbps", help="rate of one port in Gbit/s, a list, or unknown")
    option("--nics", type=COUNT, default=1, help="ports per node that carry gradients (default 1)")
    option("--transport", default="tcp", help=f"{', '.join(TRANSPORTS)} (default tcp)")
    option("--engine", choices=ENGINES, default="horovod")
    text = "library of the all-reduce; mpi and gloo sum on the CPU (default nccl)"
    option("--collective", choices=COLLECTIVES, default="nccl", help=text)
    option("--compression", choices=tuple(COMPRESSIONS), default="none")
    option("--fusion-mb", type=Number(0, 1e6), help="fusion buffer in MiB (default: horovod 128, ddp 25; 0: off)")
    option("--cycle-ms", type=Number(0, 1e6), default=1.0, help="Horovod's cycle time (default 1)")
    text = "none: one all-reduce after backward; tensor: one per gradient; fused: merged gradients (default)"
    option("--overlap", choices=OVERLAPS, default="fused", help=text)
    option("--interconnect", choices=INTERCONNECTS, default="auto", help="link between the GPUs of a node")
    option("--hierarchical", action="store_true", help="reduce within each node first")
    option("--link", choices=LINKS, default="native", help=LINK_HELP)
    option("--input-rate", type=POSITIVE, help="images/s that one node's input pipeline delivers")
    option("--servers", type=COUNT, help="parameter servers (default: one per node)")
    text = "even: every server has an equal share (BytePS); tensors: whole tensors (TensorFlow); nodes: workers serve"
    option("--placement", choices=PLACEMENTS, default="even", help=text)
    option("--period", type=COUNT, default=4, help="engines easgd, local-sgd: steps between two exchanges (default 4)")
    option("--optimizer", choices=tuple(memory.OPTIMIZERS), default="sgd", help="for the memory (default sgd)")
    option("--ceiling-gbps", type=POSITIVE, help="real bandwidth of the transport between two nodes")
    option(
        "--anchor", metavar="GPUS:RATE[@GBPS]", help="correct the model by your own measurement on two or more nodes"
    )
    option("--calibrate", type=named_path, metavar="RUN", help="fit the model to a measured run")
    option("--fit-nodes", type=COUNT, help="with --calibrate: fit on up to this many nodes and hold out the others")
    option("--validate", action="store_true", help="compare with every published table")
    text = "with --validate: judge each laboratory by a model fitted on the others (about a minute)"
    option("--by-source", action="store_true", help=text)
    option(
        "--table",
        type=named_path,
        metavar="CSV",
        help="with --validate: your own table, in the columns of hkbu-2020.csv",
    )
    option("--plot", type=plot_path, metavar="FILE", help=f"write a plot; {PLOT_FORMATS}")
    option("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    if args.table and not args.validate:
        raise UserError("--table: needs --validate")
    if args.by_source and not args.validate:
        raise UserError("--by-source: needs --validate")
    args.transport = transport(args.transport)
    if args.by_source:
        from bench.predict import by_source

        return by_source.run(args.json)
    if args.validate:
        from bench.predict import validate

        return validate.run(args.table, args.json)
    if args.calibrate:
        return _calibrate(args)
    if args.torch and _write_model(args) and args.gpus is None:
        return 0
    rows = _rows(args)
    if args.json:
        answer = [row.as_json() for row in rows]
        print(json.dumps(answer[0] if len(answer) == 1 else answer, indent=2))
    else:
        print(f"one GPU: {rows[0].setup.single_images_per_second:.1f} {_unit(rows)}/s ({rows[0].single_source})")
        fits = memory.check(rows[0].setup, args.optimizer).text
        print(f"{assumptions.text([rows[0].setup])}; memory per GPU {fits} ({args.optimizer})")
        print(_as_text(rows))
        print(_doubt(rows))
    _plot(args, rows)
    return 0


def _write_model(args: argparse.Namespace) -> bool:
    from bench.worker import torch_sizes

    if args.model is None or not models.is_file(args.model):
        raise UserError("--model-file: missing; --torch writes the layers to this file, such as my-model.csv")
    try:
        torch_sizes.write(torch_sizes.read(args.torch, args.seq_len), Path(args.model))
    except torch_sizes.Refused as error:
        raise UserError(str(error)) from None
    found = models.get(args.model)
    told = f"{found.parameters:,} parameters in {found.gradient_tensors} tensors"
    print(f"wrote {args.model}: {told}, {found.macs / 1e9:.3g} GMAC per sample", file=sys.stderr)
    return True


def _rows(args: argparse.Namespace) -> list[Row]:
    if args.gpus is None:
        raise UserError("--gpus: missing; give the number of GPUs or a list such as 1,4,8,32")
    rates = anchors.parse_rates(args.rate_gbps)
    model, batch = args.model or "resnet50", 64 if args.batch is None else args.batch
    step, source, doubt = single_step(model, batch, args.gpu, args.precision, args.single_rate, args.seq_len)
    same = {name: getattr(args, name) for name in SETUP_OPTIONS} | {"input_images_per_second": args.input_rate}
    same |= {"compute_doubt": doubt, "rate_unknown": args.rate_gbps == anchors.UNKNOWN}
    same |= {"precision": precision(args.precision, args.single_rate, args.gpu, model, args.seq_len)}
    rows = []
    for rate in rates:
        for gpus in counts(args.gpus, "--gpus"):
            setup = Setup(model, batch, step, gpus, rate_gbps=rate, **same)
            memory.check(setup, args.optimizer)
            rows.append(_row(_rate_label(setup), setup, _parameters(args, setup, rates), source))
    return rows


def _row(label: str, setup: Setup, parameters: Parameters, source: str) -> Row:
    link = link_gbps(setup, parameters) if setup.nodes > 1 else None
    return Row(label, setup, predict(setup, parameters), link, source)


def _rate_label(setup: Setup) -> str:
    if setup.rate_gbps is None:
        return "unknown rate" if setup.nodes > 1 else "one node"
    ports = f"{setup.nics} x " if setup.nics > 1 else ""
    return f"{ports}{setup.rate_gbps:g} Gbit/s {setup.transport}"


def _parameters(args: argparse.Namespace, setup: Setup, rates: Sequence[float | None]) -> Parameters:
    if args.ceiling_gbps is not None and args.anchor is not None:
        raise UserError("--anchor: cannot be combined with --ceiling-gbps; use one of them")
    if args.ceiling_gbps is not None:
        return DEFAULTS.with_ceiling(setup.transport, args.ceiling_gbps)
    if args.anchor is None:
        return DEFAULTS
    return anchors.parameters(anchors.parse(args.anchor, rates), setup)


def _unit(rows: Sequence[Row]) -> str:
    return rows[0].setup.network.unit


def _doubt(rows: Sequence[Row]) -> str:
    widest = max(rows, key=lambda row: row.prediction.high / row.prediction.low)
    got = widest.prediction
    return f"largest doubt: {got.largest_doubt}; best measured by {got.measure}"


def _as_text(rows: Sequence[Row]) -> str:
    head = ["network", "gpus", "nodes", f"{_unit(rows)}/s", "80% interval", "efficiency", "per node", "step ms"]
    head += ["compute ms", "exposed ms", "bottleneck"]
    cells = []
    for row in rows:
        got = row.prediction
        rates = f"{got.images_per_second:.1f}", f"{got.low:.0f} to {got.high:.0f}"
        shares = f"{got.efficiency:.3f}", f"{got.node_efficiency:.3f}"
        times = [f"{milliseconds:.1f}" for milliseconds in (got.step_ms, got.compute_ms, got.exposed_comm_ms)]
        cells.append((row.label, row.setup.gpus, row.setup.nodes, *rates, *shares, *times, got.bottleneck))
    return columns(head, cells)


def _calibrate(args: argparse.Namespace) -> int:
    # This imports pydantic, which takes longer than a prediction.
    from bench.predict import calibrate
    from cluster.core.progress import Progress

    progress = Progress(stderr=True)
    with progress.phase("calibrate", quiet=True):
        show = partial(progress.now, "fit")
        found = calibrate.calibrate(args.calibrate, args.fit_nodes, show=show)
    for text in found.problems:
        print(f"bench: {found.run}: {text}", file=sys.stderr)
    rates = anchors.parse_rates(args.rate_gbps)
    rows = []
    for series in found.single_step_ms:
        if not found.fitted(series):
            continue
        if (args.model and series.model != args.model) or (args.batch and series.batch != args.batch):
            continue
        usual = [series.gpus_per_node * nodes for nodes in (1, 2, 4, 8, 10, 16, 32, 64, 256, 1024)]
        wanted = counts(args.gpus, "--gpus") if args.gpus else usual
        parameters = found.parameters(series)
        for rate in rates:
            label = f"{series.fabric} {rate or series.rate_gbps:g} Gbit/s {series.model} batch {series.batch}"
            unusual = {series.transport, series.engine, series.compression} - {"tcp", "horovod-mpi", "none"}
            label = " ".join([label, *sorted(unusual)])
            for gpus in wanted:
                rows.append(_row(label, found.setup(series, gpus, rate), parameters, f"run {found.run}"))
    if not rows:
        raise UserError(f"--calibrate: {args.calibrate} has no series with that --model and --batch")
    if args.json:
        fits = {
            engine: {
                "link_share": {str(link): rounded(share) for link, share in fit.link_share.items()},
                "jitter": rounded(fit.common.jitter),
                "latency_factor": rounded(fit.latency_factor),
                "node_loss": rounded(fit.common.node_loss),
            }
            for engine, fit in found.fits.items()
        }
        residuals = [{**asdict(r.series), **as_object(r), "error": rounded(r.error)} for r in found.residuals]
        for residual in residuals:
            del residual["series"]
        predictions = [row.as_json() for row in rows]
        answer = {"run": found.run, "fits": fits, "residuals": residuals, "predictions": predictions}
        print(json.dumps(answer, indent=2))
    else:
        for engine, fit in found.fits.items():
            shares = ", ".join(f"{words.tenths(share)} of {link}" for link, share in fit.link_share.items())
            print(f"{engine} reaches {shares}; a GPU's mean delay is {words.tenths(fit.common.jitter)} of a step;")
            print(
                f"  latency x{fit.latency_factor:.2f} of the default; "
                f"{words.tenths(fit.common.node_loss)} of bandwidth lost per doubling of nodes"
            )
        print()
        head = ("fabric", "engine", "model", "batch", "nodes", "measured ms", "fitted ms", "error", "")
        cells = []
        for r in found.residuals:
            what = (r.series.fabric, r.series.engine, r.series.model, r.series.batch, r.nodes)
            cells.append((*what, f"{r.measured_ms:.1f}", f"{r.fitted_ms:.1f}", f"{r.error:+.1%}", r.left_out))
        print(columns(head, cells))
        for which, reason in (("fitted", ""), ("held out", "held out")):
            errors = [abs(r.error) for r in found.residuals if r.left_out == reason]
            if errors:
                print(f"{which}: {len(errors)} points, mean error {words.tenths(sum(errors) / len(errors))}, ", end="")
                print(f"worst {words.tenths(max(errors))}")
        print()
        print(_as_text(rows))
    _plot(args, rows)
    return 0


def _plot(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    if args.plot:
        from bench.predict.plot import draw

        try:
            draw([(row.label, row.setup, row.prediction) for row in rows], args.plot)
        except OSError as error:
            raise UserError(f"--plot: cannot write {args.plot}: {error.strerror}") from error
