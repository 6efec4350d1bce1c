"""How close a model comes to the limits of a device: arithmetic and memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import words
from bench.catalogue import gpu_rates, models
from bench.predict.memory import activations
from bench.results.points import MergedPoint
from cluster.core.errors import UserError

# (TFLOP/s at the precision the published training rates use, GB/s of memory); from memory, not looked up.
PEAKS = {
    "k80": (4.37, 240, "fp32, one of the board's two dies"),
    "gtx1080ti": (11.3, 484, "fp32"),
    "p100": (10.6, 732, "fp32"),
    "v100": (15.7, 900, "fp32"),
    "a100": (156.0, 1555, "tf32 tensor cores"),
    "h100-sxm": (989.0, 3350, "fp16 tensor cores"),
}
# How often training moves an activation between memory and chip: written by the convolution, read for statistics,
# read and written by normalisation and by the non-linearity; backward does about twice that. An estimate.
ACTIVATION_PASSES = 16
# Weights: read forward, read twice backward, gradient written, and the update reads and writes.
WEIGHT_PASSES = 6
FLOPS_PER_MAC = 2
PASSES_OF_COMPUTE = 3


@dataclass(frozen=True)
class Roofline:
    device: str
    note: str
    peak_tflops: float
    memory_gbs: float
    intensity: float
    achieved_tflops: float

    @property
    def ridge(self) -> float:
        return self.peak_tflops * 1e3 / self.memory_gbs

    @property
    def roof_tflops(self) -> float:
        return min(self.peak_tflops, self.intensity * self.memory_gbs / 1e3)

    @property
    def bound(self) -> str:
        return "compute" if self.intensity >= self.ridge else "memory"

    @property
    def share(self) -> float:
        return self.achieved_tflops / self.roof_tflops

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "peak": f"{self.peak_tflops:g} TFLOP/s {self.note}",
            "memory_gbs": self.memory_gbs,
            "flop_per_byte": self.intensity,
            "ridge_flop_per_byte": self.ridge,
            "achieved_tflops": self.achieved_tflops,
            "roof_tflops": self.roof_tflops,
            "bound": self.bound,
            "share": self.share,
            "source": "peaks published by the vendor; memory traffic estimated from the model's layers",
        }


def draw(roof: Roofline, point: MergedPoint, path: Path) -> None:
    """Plot the roof and the model under it. The suffix of the path is the format."""
    import altair as alt

    from bench import charts

    ends = sorted({0.5, roof.ridge, max(4 * roof.ridge, 4 * roof.intensity)})
    line = [{"x": x, "y": min(roof.peak_tflops, x * roof.memory_gbs / 1e3)} for x in ends]
    at = {"x": roof.intensity, "y": roof.achieved_tflops, "roof": roof.roof_tflops}
    label = f"{point.family.model_name}, batch {point.batch}: {words.percent(roof.share)} of the roof"
    traffic = "FLOP per byte of memory traffic (estimated)"
    no_grid = alt.Axis(grid=False)
    x = alt.X("x:Q", scale=alt.Scale(type="log", nice=False), axis=no_grid, title=traffic)
    y = alt.Y("y:Q", scale=alt.Scale(type="log"), axis=no_grid, title="TFLOP/s")
    dot = alt.Chart(alt.InlineData(values=[at]))
    title = alt.TitleParams(
        f"Roofline on {roof.device}: {roof.peak_tflops:g} TFLOP/s {roof.note}, {roof.memory_gbs:g} GB/s",
        subtitle=[label, *filter(None, [charts.caveat(point.family, [point])])],
        anchor="start",
    )
    chart = alt.layer(
        alt.Chart(alt.InlineData(values=line)).mark_line(color=charts.GREY, strokeWidth=2.5).encode(x=x, y=y),
        dot.mark_rule(strokeDash=[4, 3], color=charts.PALETTE[0]).encode(x=x, y=y, y2="roof:Q"),
        dot.mark_point(size=90, filled=True, opacity=1, color=charts.PALETTE[0]).encode(x=x, y=y),
    ).properties(width=520, height=300, title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    charts.write(chart, path)


def roofline(point: MergedPoint, gpu: str | None) -> Roofline | None:
    """None if the device's peaks or the model's layers are not known."""
    name = gpu or point.family.gpu.lower() or point.family.device.removeprefix("emulated:")
    name = gpu_rates.ALIASES.get(name, name)
    if gpu and name not in PEAKS:
        raise UserError(f"--gpu: the peaks of {gpu!r} are not known; use one of {', '.join(PEAKS)}")
    if name not in PEAKS or point.breakdown is None or point.breakdown.compute <= 0:
        return None
    try:
        model = models.get(point.family.model)
    except UserError:
        return None
    peak, memory, note = PEAKS[name]
    flops = FLOPS_PER_MAC * PASSES_OF_COMPUTE * model.macs
    moved = 4 * (ACTIVATION_PASSES * activations(model) + WEIGHT_PASSES * model.parameters / point.batch)
    rate = 1000 * point.batch / point.breakdown.compute
    return Roofline(name, note, peak, memory, flops / moved, rate * flops / 1e12)
