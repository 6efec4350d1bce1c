"""The GPUs of a measured trial, as options of a Setup: the same for a calibration and for a what-if."""

from __future__ import annotations

from typing import TypedDict

from bench.catalogue import interconnect
from bench.results.trial import Trial


class Device(TypedDict):
    gpu: str | None
    interconnect: str
    precision: str | None


def of(trial: Trial, gpu: str = "") -> Device:
    """gpu: the model of the nodes' GPUs, if it is known; emulated devices have their own name."""
    profile = trial.point.device.partition(":")[2]
    name = profile or (gpu.lower() if trial.kind == "cuda" else "")
    link = trial.emulation.node_gbytes if trial.emulation else None
    per_node = trial.point.gpus_per_node
    # "amp bf16" and "amp fp16" send the same bytes.
    precision = (trial.precision or "").split(" ")[0]
    return Device(
        gpu=name or None,
        interconnect=interconnect.nearest(link, name, per_node) if link else "auto",
        precision=precision or None,
    )
