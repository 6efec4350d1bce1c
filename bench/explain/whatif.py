"""What a measured cluster would do with another network or device: the predictor, corrected by the measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bench.predict import device
from bench.predict.fit import Observation, fit_link
from bench.predict.inputs import DEFAULTS, Parameters, Setup
from bench.predict.step import step_ms
from bench.results.points import MergedPoint, Table
from cluster.core.errors import UserError

FASTEST_GBPS = 800.0


@dataclass(frozen=True)
class Curve:
    """Step time over link rate for one cluster size, model, batch and transport, through every measured rate."""

    setup: Setup
    link_share: float
    base_step_ms: float
    other_ms: float
    # (link rate, measured over predicted step time), by rate
    corrections: tuple[tuple[float, float], ...]

    @property
    def rate(self) -> float:
        return self.setup.rate_gbps or 1.0

    def step(self, rate_gbps: float, link_share: float | None = None, setup: Setup | None = None) -> float:
        asked = replace(setup or self.setup, rate_gbps=rate_gbps)
        predicted = step_ms(asked, parameters(asked.transport, link_share or self.link_share))
        return predicted * self.correction(rate_gbps) + self.other_ms

    def correction(self, rate_gbps: float) -> float:
        """Interpolated by the logarithm of the rate; constant outside the measured rates."""
        known = self.corrections
        if rate_gbps <= known[0][0]:
            return known[0][1]
        for (low, at_low), (high, at_high) in pairwise(known):
            if rate_gbps <= high:
                share = math.log(rate_gbps / low) / math.log(high / low)
                return at_low + share * (at_high - at_low)
        return known[-1][1]

    def efficiency(self, rate_gbps: float) -> float:
        return min(1.0, self.base_step_ms / self.step(rate_gbps))

    def rate_for(self, target: float) -> float | None:
        """The smallest rate that reaches the target; None if no rate does."""
        low = high = None
        first = self.corrections[0][0] / 16
        steps = 60
        for number in range(steps + 1):
            rate = first * (FASTEST_GBPS / first) ** (number / steps)
            if self.efficiency(rate) >= target:
                high = rate
                break
            low = rate
        if high is None or low is None:
            return high
        for _ in range(20):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.efficiency(middle) >= target else (middle, high)
        return high

    def with_share(self, link_share: float) -> float:
        """Efficiency when the collective uses this share of the link's rate, on the rate that was measured."""
        return min(1.0, self.base_step_ms / self.step(self.rate, link_share))

    def with_compression(self, kind: str) -> float:
        return min(1.0, self.base_step_ms / self.step(self.rate, setup=replace(self.setup, compression=kind)))

    def faster_device(self, factor: float) -> float:
        """Step time with accelerators this many times as fast."""
        return self.step(self.rate, setup=replace(self.setup, single_step_ms=self.setup.single_step_ms / factor))


def parameters(transport: str, link_share: float) -> Parameters:
    return replace(DEFAULTS, link_factor=link_share / dict(DEFAULTS.goodput)[transport], fitted=True)


def setup_of(point: MergedPoint, compute_ms: float) -> Setup:
    family = point.family
    return Setup(
        model=family.model,
        batch=point.batch,
        single_step_ms=compute_ms,
        gpus=point.gpus,
        gpus_per_node=family.gpus_per_node,
        rate_gbps=point.rate_gbps,
        transport=point.transport,
        engine=family.engine.split("-")[0],
        compression=family.compression,
        **device.of(point.trials[0], family.gpu),
    )


def curve_for(point: MergedPoint, table: Table | None = None) -> Curve | None:
    """None if there is nothing to predict from: one node, no breakdown of the step, an unknown model or engine."""
    parts, efficiency = point.breakdown, point.efficiency
    if parts is None or efficiency is None or point.nodes < 2 or parts.compute <= 0:
        return None
    other = parts.data_wait + parts.straggler_wait
    try:
        setup = setup_of(point, parts.compute)
    except UserError:
        return None
    fitted = fit_link([Observation(setup, point.step_ms.median - other)])
    share = dict(DEFAULTS.goodput)[setup.transport] * fitted.link_factor
    anchors = [point]
    if table is not None:
        anchors = [
            found
            for found in table.of(point.family)
            if (found.transport, found.nodes, found.batch) == (point.transport, point.nodes, point.batch)
            and found.breakdown is not None
        ]
    return Curve(
        setup=setup,
        link_share=share,
        base_step_ms=point.step_ms.median * efficiency.median,
        other_ms=other,
        corrections=corrections(anchors, setup, share, other),
    )


def corrections(
    anchors: Sequence[MergedPoint], setup: Setup, share: float, other: float
) -> tuple[tuple[float, float], ...]:
    found: dict[float, float] = {}
    for anchor in sorted(anchors, key=lambda anchor: anchor.rate_gbps):
        predicted = step_ms(replace(setup, rate_gbps=anchor.rate_gbps), parameters(setup.transport, share))
        found[anchor.rate_gbps] = max(anchor.step_ms.median - other, 0.1 * predicted) / predicted
    return tuple(found.items())
