"""Whether a model, its optimizer and its activations fit the memory of a GPU. An estimate: frameworks differ."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from bench.catalogue import gpu_rates, models, units
from bench.predict.inputs import HALF_PRECISION, Setup
from cluster.core.errors import UserError

# GB of memory, by variant.
MEMORY_GB: dict[str, tuple[float, ...]] = {
    "k80": (12,),
    "gtx1080ti": (11,),
    "p100": (16,),
    "v100": (16, 32),
    "a100": (40, 80),
    "h100-sxm": (80,),
}
# Values that an optimizer keeps per parameter.
OPTIMIZERS = {"sgd": 1, "adam": 2, "lars": 1, "lamb": 2}
# What training keeps of each activation of a CNN: the output of the convolution and of the normalisation.
KEPT = 2
# An estimate this much too large still runs.
TOLERANCE = 1.25


@dataclass(frozen=True)
class Fit:
    """GB that training needs, and the memory of the GPU's variants; none if the GPU is not known."""

    needed_gb: float
    variants_gb: tuple[float, ...]

    @property
    def impossible(self) -> bool:
        return bool(self.variants_gb) and self.needed_gb > TOLERANCE * max(self.variants_gb)

    @property
    def text(self) -> str:
        need = f"about {self.needed_gb:.1f} GB"
        if not self.variants_gb:
            return need
        sizes = " or ".join(f"{size:g}" for size in self.variants_gb)
        fits = [size for size in self.variants_gb if self.needed_gb <= size]
        if len(fits) == len(self.variants_gb):
            return f"{need} of {sizes} GB"
        if fits:
            return f"{need} of {sizes} GB: only the variant with {fits[0]:g} GB fits"
        return f"{need} of {sizes} GB: tight"


def activations(part: models.Model | units.Unit) -> float:
    """Activations of one image: each takes one multiply-accumulate per weight of its filter."""
    filters = ((layer.macs, next((shape for shape in layer.shapes if len(shape) > 1), None)) for layer in part.layers)
    return sum(macs / prod(weights[1:]) for macs, weights in filters if weights is not None)


def activation_bytes(model: models.Model, half: bool) -> float:
    """Of one sample. Transformers: 34 s h + 5 a s^2 bytes per block in half precision (Korthikanti et al. 2022)."""
    if model.kept is not None:
        return (2 if half else 4) * model.kept
    size = units.size_of(model)
    if size is None:
        return (2 if half else 4) * KEPT * activations(model)
    tokens = model.tokens or size.positions
    blocks = size.blocks * (34 * tokens * size.hidden + 5 * size.heads * tokens * tokens)
    return (1 if half else 2) * (blocks + 4 * tokens * size.vocabulary)


def unit_bytes(setup: Setup, unit: units.Unit) -> float:
    """Of one sample in one unit."""
    size, half = units.size_of(setup.network), setup.precision in HALF_PRECISION
    if size is None:
        return (2 if half else 4) * KEPT * activations(unit)
    tokens, each = setup.network.tokens or size.positions, 1 if half else 2
    if unit.name == "head":
        return each * 4 * tokens * size.vocabulary
    block = any(layer.name.endswith("attention") for layer in unit.layers)
    return each * (34 * tokens * size.hidden + 5 * size.heads * tokens * tokens) if block else 0.0


def needed_gb(setup: Setup, optimizer: str) -> float:
    model, half = setup.network, setup.precision in HALF_PRECISION
    # Weights, gradients and the optimizer's values in single precision; a copy of the weights in half precision.
    each = 4 * (2 + OPTIMIZERS[optimizer]) + (2 if half else 0)
    return (each * model.parameters + setup.batch * activation_bytes(model, half)) / 1e9


def fit(setup: Setup, optimizer: str) -> Fit:
    stated = gpu_rates.form(setup.gpu).get("gb")
    known = MEMORY_GB.get(gpu_rates.canonical(setup.gpu or ""), ())
    return Fit(needed_gb(setup, optimizer), (float(stated),) if stated else known)


def check(setup: Setup, optimizer: str) -> Fit:
    found = fit(setup, optimizer)
    if found.impossible:
        raise UserError(
            f"--batch: {setup.model} with {setup.batch} {setup.network.unit} needs about {found.needed_gb:.0f} GB, "
            f"{setup.gpu} has {max(found.variants_gb):g}; use a smaller --batch, with --grad-accum for the same update"
        )
    return found
