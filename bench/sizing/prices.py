"""What things cost per hour, USD: round figures to compare designs with. Every plan shows them and takes yours."""

from __future__ import annotations

from bench.catalogue import gpu_rates

# One GPU's share of a cloud instance on demand, rounded and from memory, not looked up; they drift.
GPU_HOUR = {"k80": 0.45, "gtx1080ti": 0.3, "p100": 1.5, "v100": 2.5, "a100": 3.7, "h100-sxm": 7.0}
# A host's chassis, CPU and memory.
NODE_HOUR = 0.5
# A port with its share of the switch, by transport and Gbit/s.
PORT_HOUR: dict[tuple[str, float], float] = {
    ("tcp", 1.0): 0.01,
    ("tcp", 10.0): 0.05,
    ("tcp", 25.0): 0.1,
    ("tcp", 40.0): 0.15,
    ("tcp", 100.0): 0.4,
    ("rdma", 56.0): 0.35,
    ("rdma", 100.0): 0.5,
    ("rdma", 200.0): 0.9,
}


def gpu_hour(gpu: str | None) -> float:
    """Price of a GPU hour; a GPU that only its measured rate is known of costs as much as a V100."""
    return GPU_HOUR[gpu_rates.get(gpu).name] if gpu else GPU_HOUR["v100"]
