"""What limits one measured point: network, collective, data, a slow node, the host, or nothing but compute."""

from __future__ import annotations

from dataclasses import dataclass

from bench import words
from bench.catalogue import models
from bench.results.points import MergedPoint
from bench.results.trial import Point, Trial
from cluster.core.errors import UserError

# If less than this share of a step is lost, the accelerator is the limit.
LOSS_WORTH_NAMING = 0.20
CPU_SATURATED = 90.0
# Cores that decode for this share of the time are at their limit. The rest is overhead.
DECODE_BUSY = 0.75
LINK_FULL = 0.75
LINK_AS_CONFIGURED = 0.80
BYTES_TOLERANCE = 0.15
WIRE_SHARE = {"none": 1.0, "fp16": 0.5, "1bit": 1 / 32}

LIMITS = {
    "compute": "compute",
    "network": "network",
    "collective": "all-reduce",
    "link": "link below its rate",
    "node-link": "link between GPUs",
    "storage": "storage",
    "decode": "decode CPU",
    "straggler": "slow node",
    "host-cpu": "host CPU",
    "wrong-nic": "wrong network interface",
    "unknown": "not known",
}


@dataclass(frozen=True)
class Diagnosis:
    limit: str
    reason: str
    change: str

    @property
    def label(self) -> str:
        return LIMITS[self.limit]


@dataclass(frozen=True)
class Stray:
    """The nodes of a trial that sent most of their traffic over another interface than intended."""

    nodes: list[str]
    interface: str
    share: float
    intended: str

    def diagnose(self) -> Diagnosis:
        return Diagnosis(
            "wrong-nic",
            f"{words.several(self.nodes)} sent {words.percent(self.share)} of the bytes over {self.interface}, "
            f"not {self.intended}",
            f"make MPI and Horovod use {self.intended} (select it by the fabric's subnet) and run the sweep again",
        )


def stray_traffic(trial: Trial) -> Stray | None:
    traffic = trial.traffic
    if traffic is None:
        return None
    found: dict[str, tuple[str, float]] = {}
    for node, others in traffic.other_bytes.items():
        sent = traffic.measured_bytes.get(node, 0.0)
        if not others or sent >= (1 - BYTES_TOLERANCE) * traffic.expected_bytes:
            continue
        name, most = max(others.items(), key=lambda item: item[1])
        if most > sent and most > 0:
            found[node] = (name, most / (sum(others.values()) + sent))
    if not found:
        return None
    interface, _ = max(found.values(), key=lambda item: item[1])
    share = sum(part for _, part in found.values()) / len(found)
    return Stray(sorted(found), interface, share, traffic.interface)


def wire_bytes(point: Point) -> float | None:
    """Bytes one node sends per step in a ring over all ranks, compression included; None if the model is not known."""
    try:
        size = float(models.get(point.model).gradient_bytes)
    except UserError:
        return None
    share = 2 * (point.gpus - 1) / point.gpus if point.nodes > 1 else 0.0
    return share * size * WIRE_SHARE.get(point.compression, 1.0)


def diagnose(point: MergedPoint) -> Diagnosis:
    for trial in point.trials:
        if stray := stray_traffic(trial):
            return stray.diagnose()
    parts = point.breakdown
    if parts is None:
        return Diagnosis("unknown", "the trial has no breakdown of its step time", "record one with `bench sweep`")
    step = point.step_ms.median
    losses = {"comm": parts.exposed_comm, "data": parts.data_wait, "straggler": parts.straggler_wait}
    worst = max(losses, key=lambda name: losses[name])
    share = words.percent(losses[worst] / step)
    # MPI ranks poll while they wait, so a busy CPU alone proves nothing. If the step did not change at twice the scale
    # factor, with half the bytes to send, the host was not the limit.
    cleared = point.family.kind == "cpu" or point.converged is True
    saturated = (point.host_cpu or 0.0) >= CPU_SATURATED and not cleared
    if sum(losses.values()) < LOSS_WORTH_NAMING * step:
        why = f"{words.percent(parts.compute / step)} of every step is compute"
        more = "use a faster accelerator, or more of them: the network and the data path keep up"
        return Diagnosis("compute", why, more)
    if worst == "straggler":
        names = words.several(point.stragglers) if point.stragglers else "an unknown node"
        why = f"the others wait for {names} during {share} of every step"
        return Diagnosis("straggler", why, f"repair or leave out {names}")
    if worst == "data":
        return diagnose_data(point, share, saturated)
    return diagnose_communication(point, share, saturated)


def diagnose_data(point: MergedPoint, share: str, saturated: bool) -> Diagnosis:
    busy, cpu = point.decode_busy, point.host_cpu
    waits = f"the accelerators wait for images during {share} of every step"
    if busy is not None and busy >= DECODE_BUSY:
        cores = point.trials[0].input.cores if point.trials[0].input else 0
        why = f"{waits} while decoding keeps {words.count(cores, 'core')} per GPU {words.percent(busy)} busy"
        more = "give decoding more cores (data_cores in the plan), or decode on the accelerator"
        return Diagnosis("decode", why, more)
    if saturated and busy is None:
        why = f"{waits} while the host CPU is {cpu:.0f}% busy"
        return Diagnosis("decode", why, "give decoding more cores, or decode on the accelerator")
    if busy is not None:
        waits += f" while the cores that decode are only {words.percent(busy)} busy"
    elif cpu is not None:
        waits += f" while the host CPU is only {cpu:.0f}% busy"
    return Diagnosis("storage", waits, "read from faster or more drives, or from sequential shards")


def diagnose_communication(point: MergedPoint, share: str, saturated: bool) -> Diagnosis:
    link = point.link_gbps or point.rate_gbps
    used = point.bus_gbps.median / link if point.bus_gbps and link > 0 else None
    exposed = f"communication is exposed during {share} of every step"
    if point.nodes == 1:
        more = "use GPUs that NVLink joins, gradient compression, or a larger batch"
        return Diagnosis("node-link", f"{exposed}, between the GPUs of one node", more)
    if saturated and (used is None or used < LINK_FULL):
        why = f"the host CPU is {point.host_cpu:.0f}% busy"
        if used is not None:
            why += f" and the all-reduce reaches only {words.percent(used)} of the link"
        more = "free cores for communication (fewer decode workers, bind processes, RDMA instead of TCP)"
        if point.family.kind == "emulated":
            more = "rerun at a larger scale factor s or with fewer nodes: these figures are too low"
        return Diagnosis("host-cpu", why, more)
    if point.link_gbps is not None and point.link_gbps < LINK_AS_CONFIGURED * point.rate_gbps:
        why = f"the link delivers {words.gbps(point.link_gbps)} of {words.gbps(point.rate_gbps)}"
        if seen := point.link_evidence:
            why += f" (measured by the deploy, {words.age(seen.measured, point.trials[-1].started)})"
        return Diagnosis("link", why, "check the cable, the negotiated speed and the MTU before anything else")
    if used is not None and used < LINK_FULL:
        why = f"{exposed}, but the all-reduce uses only {words.percent(used)} of the link"
        return Diagnosis("collective", why, "tune the collective (`make tune`) before buying a faster network")
    if used is not None:
        exposed += f" and the all-reduce fills {words.percent(min(used, 1.0))} of the link"
    return Diagnosis("network", exposed, "use a faster fabric, gradient compression, or a larger batch")
