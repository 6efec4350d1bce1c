"""The link between the GPUs of a node."""

from __future__ import annotations

# Ring bandwidth in GB/s. PCIe: 153 MB in 24 ms (hkbu-2020.csv, 4 GPUs of one node, bsp). NVLink is assumed.
GBYTES = {"pcie": 6.4, "nvlink": 40.0}


def gbytes(kind: str, gpu: str | None, gpus_per_node: int) -> float:
    """The bandwidth of a kind, or with `auto` of the usual one: NVLink in nodes of eight GPUs, and from A100 on."""
    if kind == "auto":
        linked = gpus_per_node >= 8 or (gpu or "").startswith(("a100", "h100"))
        kind = "nvlink" if linked and gpu != "k80" else "pcie"
    return GBYTES[kind]
