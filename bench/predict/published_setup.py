"""The configuration behind a published row. What its table lacks is assumed here."""

from __future__ import annotations

from bench.catalogue import gpu_rates
from bench.catalogue.measurements import Measurement
from bench.predict.fit import Observation
from bench.predict.inputs import Setup

# PCIe between eight GPUs: the row says "no NVLink".
NO_NVLINK = {"issue-416"}
# The rates of huyutuo were limits on a faster port. The nodes of petuum were virtual machines.
LINKS = {"huyutuo": "limiter", "petuum": "cloud"}


def setup_of(row: Measurement) -> Setup:
    linked = row.gpus_per_node >= 8 and not row.gpu.startswith("k80") and row.laboratory not in NO_NVLINK
    return Setup(
        row.model,
        row.batch,
        1000 * row.batch / row.single,
        row.gpus,
        row.gpus_per_node,
        row.rate_gbps,
        row.transport or "verbs",
        engine=row.engine,
        overlap=row.overlap,
        interconnect="nvlink" if linked else "pcie",
        gpu=gpu_rates.canonical(row.gpu),
        seq_len=row.seq_len,
        precision=row.precision,
        grad_accum=row.grad_accum,
        collective=row.collective,
        placement="tensors" if row.engine == "ps" and "byteps" not in row.note else "even",
        rate_unknown=row.rate_gbps is None,
        link=LINKS.get(row.laboratory, "native"),
    )


def observation_of(row: Measurement) -> Observation:
    return Observation.of_rate(setup_of(row), row.images_per_second)
