"""The roofline of a recurrent layer: what reloading its weights at every time step costs, and what keeping them saves.

A time step multiplies the hidden state of every sequence with the recurrent weights. The next step needs the result, so
steps cannot be merged into one product. A GPU that starts a kernel per step reads all weights from memory in each. A
persistent kernel keeps them in the registers of the chip (Diamos et al., Persistent RNNs, ICML 2016). The product with
the layer's input needs no earlier step: it is one large matrix product and is left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import words
from bench.catalogue import gpu_rates
from bench.explain.roofline import FLOPS_PER_MAC, PEAKS
from cluster.core.errors import UserError
from cluster.core.tables import columns

# Matrices of hidden x hidden.
CELLS = {"rnn": 1, "gru": 3, "lstm": 4}
# Registers of all multiprocessors, MB: their number times 256 KB (k80: 512); from memory, not looked up.
REGISTERS_MB = {"k80": 6.8, "gtx1080ti": 7.3, "p100": 14.7, "v100": 21.0, "a100": 28.3, "h100-sxm": 34.6}
# The share of them that weights may fill. Diamos et al. kept 1152 x 1152 weights in the 6.3 MB of a Titan X.
USABLE = 0.85
# All multiprocessors wait for each other after every time step, in microseconds. An estimate: with it the rate of a
# Titan X at batch 4 is 2.8 TFLOP/s, as Diamos et al. measured. A kernel per step costs at least as much.
BARRIER_US = 2.0
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_HIDDEN = 65536


@dataclass(frozen=True)
class Cell:
    kind: str
    hidden: int

    @property
    def weights(self) -> int:
        return CELLS[self.kind] * self.hidden**2

    @property
    def activations(self) -> int:
        """Values that move per sequence and step: the input's share of each gate, the state in and out."""
        return (CELLS[self.kind] + 2) * self.hidden

    def __str__(self) -> str:
        return f"{self.kind}:{self.hidden}"


@dataclass(frozen=True)
class Chip:
    """The limits of a device for recurrent layers; `bytes_each` of a weight."""

    name: str
    note: str
    peak_tflops: float
    memory_gbs: float
    registers_mb: float
    bytes_each: int
    barrier_us: float = BARRIER_US

    @property
    def ridge(self) -> float:
        return self.peak_tflops * 1e3 / self.memory_gbs

    @property
    def largest_weights_mb(self) -> float:
        return USABLE * self.registers_mb

    def largest_hidden(self, kind: str) -> int:
        return math.isqrt(int(self.largest_weights_mb * 1e6 / self.bytes_each / CELLS[kind]))


@dataclass(frozen=True)
class Way:
    """One time step forward, with the weights read again or kept."""

    flop_per_byte: float
    roof_tflops: float
    step_us: float
    tflops: float
    weight_share: float  # of the bytes that move
    bound: str


@dataclass(frozen=True)
class Row:
    batch: int
    reload: Way
    kept: Way | None  # None: the weights do not fit

    @property
    def gain(self) -> float | None:
        return self.reload.step_us / self.kept.step_us if self.kept else None


def parse(text: str) -> Cell:
    found = re.fullmatch(r"(rnn|gru|lstm):(\d{1,6})", text.strip().lower())
    if not found or not 1 <= int(found[2]) <= MOST_HIDDEN:
        known = ", ".join(CELLS)
        raise UserError(f"--roofline: {text[:60]!r} is not a layer; write {known} and hidden units, such as lstm:1024")
    return Cell(found[1], int(found[2]))


def chip(gpu: str) -> Chip:
    name = gpu_rates.canonical(gpu)
    if name not in PEAKS:
        raise UserError(f"--gpu: the peaks of {gpu[:60]!r} are not known; use one of {', '.join(PEAKS)}")
    peak, memory, note = PEAKS[name]
    return Chip(name, note, peak, memory, REGISTERS_MB[name], 2 if "fp16" in note else 4)


def way(cell: Cell, device: Chip, batch: int, kept: bool) -> Way:
    flops = FLOPS_PER_MAC * cell.weights * batch
    weights = 0 if kept else cell.weights * device.bytes_each
    moved = weights + cell.activations * batch * device.bytes_each
    compute, memory = flops / device.peak_tflops / 1e6, moved / device.memory_gbs / 1e3
    step = max(compute, memory) + device.barrier_us
    limits = {"compute": compute, "weights" if weights > moved / 2 else "activations": memory}
    limits["synchronisation"] = device.barrier_us
    return Way(
        flop_per_byte=flops / moved,
        roof_tflops=flops / max(compute, memory) / 1e6,
        step_us=step,
        tflops=flops / step / 1e6,
        weight_share=weights / moved,
        bound=max(limits, key=lambda name: limits[name]),
    )


def rows(cell: Cell, device: Chip, batches: Sequence[int] = BATCHES) -> list[Row]:
    fits = cell.hidden <= device.largest_hidden(cell.kind)
    return [Row(n, way(cell, device, n, False), way(cell, device, n, True) if fits else None) for n in batches]


def explain(cell: Cell, device: Chip, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    size = cell.weights * device.bytes_each / 1e6
    return {
        "layer": str(cell),
        "device": device.name,
        "peak": f"{device.peak_tflops:g} TFLOP/s {device.note}",
        "memory_gbs": device.memory_gbs,
        "ridge_flop_per_byte": device.ridge,
        "weights_mb": size,
        "registers_mb": device.registers_mb,
        "usable_share_of_registers": USABLE,
        "largest_hidden": device.largest_hidden(cell.kind),
        "fits": cell.hidden <= device.largest_hidden(cell.kind),
        "devices_to_hold_it": math.ceil(size / device.largest_weights_mb),
        "batches": [{**asdict(row), "gain": row.gain} for row in rows(cell, device, batches)],
        "source": "peaks published by the vendor; traffic and synchronisation estimated; not measured",
    }


def as_text(report: dict[str, Any]) -> str:
    layer, found = report["layer"], report["batches"]
    head = (
        f"Recurrent layer {layer} on {report['device']} ({report['peak']}, {report['memory_gbs']} GB/s), one time step "
        f"forward, ridge at {words.significant(report['ridge_flop_per_byte'], 2)} FLOP per byte"
    )
    names = ("batch", "FLOP/byte", "weights", "limit", "TFLOP/s", "kept: FLOP/byte", "limit", "TFLOP/s", "gain")
    cells = []
    for row in found:
        again, kept = row["reload"], row["kept"]
        cells.append(
            (
                row["batch"],
                words.significant(again["flop_per_byte"]),
                words.percent(again["weight_share"]),
                again["bound"],
                words.significant(again["tflops"]),
                *(
                    (words.significant(kept["flop_per_byte"]), kept["bound"], words.significant(kept["tflops"]))
                    if kept
                    else ("-", "-", "-")
                ),
                f"x{row['gain']:.1f}" if row["gain"] else "-",
            )
        )
    first = found[0]["reload"]
    why = (
        f"Every time step reads {words.significant(report['weights_mb'])} MB of weights at batch "
        f"{found[0]['batch']}: {words.percent(first['weight_share'])} of what moves. A larger batch shares this read."
    )
    limit = (
        f"Register file: {report['registers_mb']:g} MB, {words.percent(report['usable_share_of_registers'])} usable: "
        f"at most {report['largest_hidden']} hidden units of {layer.partition(':')[0]}. "
    )
    if report["fits"]:
        limit += "This layer fits: a persistent kernel reads its weights once per sequence."
    else:
        need = report["devices_to_hold_it"]
        limit += f"This layer does not fit: it would need the registers of {words.count(need, 'GPU')}."
    return "\n".join([head, columns(names, cells), "", why, limit, f"{report['source'].capitalize()}."])


def draw(cell: Cell, device: Chip, batches: Sequence[int], path: Path) -> None:
    """The roof with a dot per batch, and the rate against the hidden units with the register file as a line."""
    import altair as alt

    from bench import charts

    colour = alt.Color("weights:N", title=None, scale=charts.colour_scale(["read in every step", "kept on chip"]))
    dots: list[dict[str, Any]] = [
        {"x": one.flop_per_byte, "y": one.tflops, "weights": label, "batch": row.batch}
        for row in rows(cell, device, batches)
        for label, one in (("read in every step", row.reload), ("kept on chip", row.kept))
        if one
    ]
    most = max([4 * device.ridge, *(2 * dot["x"] for dot in dots)])
    roof = [
        {"x": x, "y": min(device.peak_tflops, x * device.memory_gbs / 1e3)} for x in sorted({0.25, device.ridge, most})
    ]
    log, plain = alt.Scale(type="log", nice=False), alt.Axis(grid=False)
    x = alt.X("x:Q", scale=log, axis=plain, title="FLOP per byte of memory traffic (estimated)")
    y = alt.Y("y:Q", scale=alt.Scale(type="log"), axis=plain, title="TFLOP/s, one time step")
    points = alt.Chart(alt.InlineData(values=dots))
    left = alt.layer(
        alt.Chart(alt.InlineData(values=roof)).mark_line(color=charts.GREY, strokeWidth=2.5).encode(x=x, y=y),
        points.mark_point(size=70, filled=True, opacity=1).encode(x=x, y=y, color=colour),
        points.mark_text(dy=-9, fontSize=10).encode(x=x, y=y, text="batch:N"),
    ).properties(width=400, height=280, title=f"{cell}, by batch")
    largest, smallest = device.largest_hidden(cell.kind), min(batches)
    sizes = sorted({round(largest * 2 ** (step / 4)) for step in range(-12, 9)} | {largest, cell.hidden})
    curves = [
        {"hidden": size, "y": way(Cell(cell.kind, size), device, smallest, kept).tflops, "weights": label}
        for size in sizes
        for label, kept in (("read in every step", False), ("kept on chip", True))
        if not kept or size <= largest
    ]
    hidden = alt.X("hidden:Q", scale=log, axis=plain, title=f"hidden units of {cell.kind}")
    limit = alt.Chart(alt.InlineData(values=[{"hidden": largest, "text": f"register file: {largest}"}]))
    right = alt.layer(
        alt.Chart(alt.InlineData(values=curves)).mark_line(strokeWidth=2.5).encode(x=hidden, y=y, color=colour),
        limit.mark_rule(strokeDash=[4, 3], color=charts.GREY).encode(x=hidden),
        limit.mark_text(align="left", dx=5, y=12).encode(x=hidden, text="text:N"),
    ).properties(width=400, height=280, title=f"batch {smallest}, by size of the layer")
    title = (
        f"Recurrent layers on {device.name}: {device.peak_tflops:g} TFLOP/s {device.note}, {device.memory_gbs:g} GB/s"
    )
    chart = alt.hconcat(left, right).properties(
        title=alt.TitleParams(title, subtitle=["CALCULATED, not measured"], anchor="start")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    charts.write(chart, path)
