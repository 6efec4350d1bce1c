"""The link between the GPUs of a node."""

from __future__ import annotations

import math

from bench.catalogue import gpu_rates

# Ring bandwidth in GB/s. PCIe: 153 MB in 24 ms (hkbu-2020.csv, 4 GPUs of one node, bsp); BERT there implies 4.1. NVLink
# of a GPU that is not listed below is assumed.
GBYTES = {"pcie": 6.4, "nvlink": 40.0}
# Bus bandwidth that nccl-tests show, by generation.
NVLINK_GBYTES = {"p100": 40.0, "v100": 120.0, "a100": 200.0, "h100-sxm": 480.0}
# What images take into one GPU: PCIe 3.0 x16 in practice.
PCIE_IN_GBYTES = 12.0
# GPUs that reach the full ring bandwidth over PCIe. More share the uplinks of their switches.
PCIE_GPUS = 4
WITHOUT_NVLINK = ("k80", "gtx1080ti")
NAMES = {"pcie": "PCIe", "nvlink": "NVLink"}


def resolve(kind: str, gpu: str | None, gpus_per_node: int) -> str:
    """pcie or nvlink; `auto`: as the GPU's name says, else NVLink in nodes of eight GPUs, and from A100 on."""
    if kind != "auto":
        return kind
    if link := gpu_rates.form(gpu).get("link"):
        return "pcie" if link == "pcie" else "nvlink"
    known = gpu_rates.canonical(gpu or "")
    linked = gpus_per_node >= 8 or known.startswith(("a100", "h100"))
    return "nvlink" if linked and known not in WITHOUT_NVLINK else "pcie"


def gbytes(kind: str, gpu: str | None, gpus_per_node: int) -> float:
    if resolve(kind, gpu, gpus_per_node) == "pcie":
        return GBYTES["pcie"] * min(1.0, PCIE_GPUS / gpus_per_node)
    return NVLINK_GBYTES.get(gpu_rates.canonical(gpu or ""), GBYTES["nvlink"])


def nearest(measured: float, gpu: str | None, gpus_per_node: int) -> str:
    """The kind whose bandwidth is nearest to a measured one."""
    return min(GBYTES, key=lambda kind: abs(math.log(gbytes(kind, gpu, gpus_per_node) / measured)))
