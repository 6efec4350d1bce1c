"""What we expect of a cluster, and what was found: pure functions from facts and trials to findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.catalogue import gpu_rates
from bench.results.trial import Trial
from cluster.core.contract import Contract
from cluster.core.errors import UserError
from cluster.device_check import Checked

# Exposed communication on one GPU is a remainder of measured times: it should be nothing.
ONE_GPU_EXPOSED = 0.02
# Compute does not contain communication, so it is the same on one GPU and on all.
SAME_COMPUTE = 0.05
# Horovod and DDP send the same bytes.
SAME_STEP = 0.15
# Drivers, clocks and power limits differ from the published machine's.
PUBLISHED = 0.35
NCCL_TESTS = 0.20
STEADY = 0.02


@dataclass(frozen=True)
class Finding:
    """One check. ok is None where there was nothing to compare."""

    subject: str
    expected: str
    found: str
    ok: bool | None


def near(value: float, wanted: float, share: float) -> bool:
    return abs(value - wanted) <= share * wanted


def cards(contract: Contract, topology: list[dict[str, Any]]) -> list[Finding]:
    """GPUs and network cards of the nodes, as the kernel and nvidia-smi see them."""
    fabric, found = contract.fabrics[contract.active_fabric], []
    for node in topology:
        name, card = node["node"].partition(".")[0], node["card"]
        wanted, present = contract.nodes[name].gpus, len(node["gpus"])
        found.append(Finding(f"{name}: GPUs (nvidia-smi)", str(wanted), str(present), present == wanted))
        speed = card["speed_mbit"]
        least = f"{fabric.rate_gbps:g} Gbit/s or more"
        text = f"{speed / 1000:g} Gbit/s" if speed else "not told"
        ok = speed / 1000 >= 0.99 * fabric.rate_gbps if speed and not fabric.shaped else None
        found.append(Finding(f"{name}: speed of {card['interface']}", least, text, ok))
        if fabric.transport == "verbs":
            ports = ", ".join(card["adapters"]) or "none"
            found.append(
                Finding(f"{name}: RDMA ports of {card['interface']}", "one or more", ports, bool(card["adapters"]))
            )
        apart = [
            gpu["bus"]
            for gpu in node["gpus"]
            if None not in (gpu["numa"], card["numa"]) and gpu["numa"] != card["numa"]
        ]
        if present:
            text = f"{len(apart)} of {present} on another one"
            found.append(Finding(f"{name}: GPUs on the card's NUMA node", "all", text, not apart))
    return found


def devices(checked: Checked, cuda: bool) -> list[Finding]:
    """The product on every device and the all-reduce over all."""
    what = "GPUs" if cuda else "CPUs"
    ranks = checked.done.ranks
    wrong = [f"{rank.node}/{rank.local_rank}" for rank in ranks if not rank.right]
    found = [
        Finding(f"a product on all {len(ranks)} {what}", "that of the CPU", ", ".join(wrong) or "the same", not wrong)
    ]
    errors = checked.done.errors
    found.append(Finding(f"all-reduce over {len(ranks)} {what}", "0 wrong elements", str(errors), errors == 0))
    floor = checked.floor_gbps if cuda else None
    least = f"{floor:g} Gbit/s or more" if floor else "no limit on one node or without GPUs"
    ok = checked.bus_gbps >= floor if floor else None
    found.append(Finding("its bus bandwidth", least, f"{checked.bus_gbps:.2f} Gbit/s", ok))
    versions = (
        {f"{rank.name}, driver {rank.driver}, CUDA {rank.cuda}, NCCL {rank.nccl}" for rank in ranks} if cuda else set()
    )
    if cuda:
        found.append(
            Finding("GPU, driver, CUDA and NCCL", "the same on all", "; ".join(sorted(versions)), len(versions) == 1)
        )
    return found


def beside_nccl_tests(rows: list[dict[str, Any]]) -> list[Finding]:
    """Our all-reduce and that of nccl-tests, at the largest size that both measured."""
    by_engine: dict[str, dict[int, float]] = {}
    for row in rows:
        by_engine.setdefault(row["engine"], {})[row["size"]] = row["busbw_gbps"]
    ours, theirs = by_engine.get("nccl", {}), by_engine.get("nccl-tests", {})
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return [Finding("nccl-tests", "the bandwidth of our all-reduce", "not installed", None)]
    size = common[-1]
    text = f"{theirs[size]:.2f} Gbit/s, ours {ours[size]:.2f}, for {size} bytes"
    return [
        Finding(
            "nccl-tests", f"our bandwidth within {NCCL_TESTS:.0%}", text, near(ours[size], theirs[size], NCCL_TESTS)
        )
    ]


def name_of(trial: Trial) -> str:
    point = trial.point
    return f"{point.engine} on {point.nodes} x {point.gpus_per_node}"


def trials(measured: list[Trial], gpu_model: str) -> list[Finding]:
    found = [
        Finding(f"{name_of(trial)}: trial and its proof of transport", "ok", trial.error or "ok", trial.status == "ok")
        for trial in measured
    ]
    good = [trial for trial in measured if trial.status == "ok" and trial.breakdown_ms and trial.step_ms]
    for trial in good:
        found += alone(trial, gpu_model) if trial.point.gpus == 1 else []
        if trial.steadiness:
            drift = trial.steadiness.drift
            found.append(
                Finding(f"{name_of(trial)}: drift", f"within {STEADY:.0%}", f"{drift:+.1%}", abs(drift) <= STEADY)
            )
    return found + compute_everywhere(good) + engines_agree(good)


def alone(trial: Trial, gpu_model: str) -> list[Finding]:
    """One device: no communication, and the published rate."""
    assert trial.breakdown_ms and trial.step_ms  # noqa: S101
    share = trial.breakdown_ms.exposed_comm / trial.step_ms.median
    limit = f"under {ONE_GPU_EXPOSED:.0%} of the step"
    found = [Finding(f"{name_of(trial)}: exposed communication", limit, f"{share:.1%}", share < ONE_GPU_EXPOSED)]
    if trial.kind == "cuda" and (wanted := published_ms(trial, gpu_model)):
        text = f"{trial.step_ms.median:.1f} ms"
        ok = near(trial.step_ms.median, wanted, PUBLISHED)
        found.append(
            Finding(f"{name_of(trial)}: step", f"{wanted:.1f} ms (published) within {PUBLISHED:.0%}", text, ok)
        )
    return found


def published_ms(trial: Trial, gpu_model: str) -> float | None:
    """None if nobody published this GPU in this precision."""
    precision = "amp" if (trial.precision or "").startswith("amp") else trial.precision
    try:
        return gpu_rates.compute_ms(gpu_model.lower(), trial.point.model, trial.point.batch, precision)[0]
    except UserError:
        return None


def compute_everywhere(good: list[Trial]) -> list[Finding]:
    """Compute on many devices, as a share of that on one."""
    found = []
    for engine in dict.fromkeys(trial.point.engine for trial in good):
        own = [trial for trial in good if trial.point.engine == engine and trial.breakdown_ms]
        first = next((trial for trial in own if trial.point.gpus == 1), None)
        for trial in own:
            if first is None or trial is first or not (first.breakdown_ms and trial.breakdown_ms):
                continue
            one, many = first.breakdown_ms.compute, trial.breakdown_ms.compute
            expected = f"{one:.1f} ms, as on one device, within {SAME_COMPUTE:.0%}"
            found.append(
                Finding(f"{name_of(trial)}: compute", expected, f"{many:.1f} ms", near(many, one, SAME_COMPUTE))
            )
    return found


def engines_agree(good: list[Trial]) -> list[Finding]:
    """Horovod and DistributedDataParallel send the same bytes over the same library on GPUs."""
    found = []
    steps = {(t.point.engine, t.point.nodes, t.point.gpus_per_node): t for t in good if t.kind == "cuda"}
    for (engine, nodes, gpus), trial in steps.items():
        other = steps.get(("ddp", nodes, gpus))
        if engine == "ddp" or other is None or not (trial.step_ms and other.step_ms):
            continue
        ours, theirs = trial.step_ms.median, other.step_ms.median
        expected = f"{theirs:.1f} ms, as ddp, within {SAME_STEP:.0%}"
        found.append(Finding(f"{name_of(trial)}: step", expected, f"{ours:.1f} ms", near(ours, theirs, SAME_STEP)))
    return found
