"""Check the GPUs of all nodes: each computes as the training account, and NCCL adds up over all at a fair rate."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from bench.worker import fabric as fabric_of_node
from bench.worker import protocol
from bench.worker.protocol import DevicesDone, Failed
from cluster import fabric_settings, tuning
from cluster.core import ssh, worker_files
from cluster.core.config import layout
from cluster.core.contract import Contract, Fabric, TransportName
from cluster.core.errors import InfraError
from cluster.core.printable import printable

BYTES, SECONDS, TIMEOUT = 256 << 20, 3.0, 300
# Bus bandwidth between nodes, as a share of the fabric's rate, below which something is wrong. One TCP connection
# rarely fills a fast link.
FLOOR: dict[TransportName, float] = {"tcp": 0.4, "verbs": 0.7, "efa": 0.4}
LAST_LINES = ("Error", "error", "NCCL WARN")


@dataclass(frozen=True)
class Checked:
    """What the check found; problems: one line each."""

    done: DevicesDone
    bus_gbps: float
    floor_gbps: float | None  # None on one node, where no fabric limits NCCL
    problems: list[str]

    def result(self) -> dict[str, Any]:
        ranks = [
            {
                name: getattr(rank, name)
                for name in ("node", "local_rank", "name", "driver", "cuda", "nccl", "product", "links")
            }
            for rank in self.done.ranks
        ]
        return {"ranks": ranks, "bus_gbps": round(self.bus_gbps, 2), "floor_gbps": self.floor_gbps}


def launch(
    contract: Contract, settings: tuning.Tuning, cuda: bool, size: int = BYTES, seconds: float = SECONDS
) -> list[str]:
    """mpirun with one rank per GPU, on nodes that may have different numbers of them."""
    fabric = contract.fabrics[contract.active_fabric]
    slots = {name: max(1, contract.nodes[name].gpus) if cuda else 1 for name in contract.compute}
    hosts = ",".join(f"{name}:{count}" for name, count in slots.items())
    subnet = contract.subnet(contract.active_fabric)
    variables = {fabric_of_node.VARIABLE: f"{fabric.transport} {subnet}", "OMP_NUM_THREADS": "1"}
    if cuda:
        variables |= {"NCCL_DEBUG": "WARN", **fabric_settings.nccl(fabric.transport, settings)}
    parameters = fabric_settings.mca(fabric.transport, subnet, cuda)
    words = [f"{layout()['venv']}/bin/python", worker_files.folder(), "check_devices", "cuda" if cuda else "cpu"]
    return [
        *("mpirun", "-np", str(sum(slots.values())), "-H", hosts, "-bind-to", "none", "-map-by", "slot"),
        *(word for name, value in parameters.items() for word in ("-mca", name, value)),
        *(word for name, value in variables.items() for word in ("-x", f"{name}={value}")),
        *(*words, str(size // 4), str(seconds)),
    ]


def bus_gbps(done: DevicesDone) -> float:
    """As in nccl-tests: in a ring this is what a node sends to the next one."""
    ranks = len(done.ranks)
    return 2 * (ranks - 1) / ranks * done.size * 8 / statistics.median(done.times) / 1e9


def floor_gbps(fabric: Fabric, nodes: int) -> float | None:
    return FLOOR[fabric.transport] * fabric.rate_gbps if nodes > 1 else None


def judge(done: DevicesDone, contract: Contract) -> Checked:
    problems = []
    for name in contract.compute:
        wanted, ranks = contract.nodes[name].gpus, [rank for rank in done.ranks if rank.node.partition(".")[0] == name]
        if seen := [rank.seen for rank in ranks if rank.seen != wanted]:
            problems.append(f"{name}: torch sees {seen[0]} GPUs, cluster.yml has {wanted}")
        wrong = [str(rank.local_rank) for rank in ranks if not rank.right]
        problems += [f"{name}: GPU {number} multiplies wrongly: replace it" for number in wrong]
    if done.errors:
        problems.append(f"NCCL: {done.errors} elements of an all-reduce over {len(done.ranks)} GPUs are wrong")
    fabric, bus = contract.fabrics[contract.active_fabric], bus_gbps(done)
    floor = floor_gbps(fabric, len(contract.compute))
    if floor and bus < floor:
        where = f"{len(done.ranks)} GPUs on {len(contract.compute)} nodes"
        wanted_text = f"{floor:g} is the least on {contract.active_fabric} ({fabric.transport}, {fabric.rate_gbps:g})"
        problems.append(f"NCCL: {bus:.2f} Gbit/s of bus bandwidth over {where}, {wanted_text}")
    return Checked(done, bus, floor, problems)


def measure(env: str, contract: Contract, cuda: bool, size: int = BYTES, seconds: float = SECONDS) -> DevicesDone:
    """Raises InfraError if a rank found no device, or the launch failed."""
    worker_files.install(contract, contract.compute)
    active = contract.active_fabric
    settings = tuning.choose(tuning.load(env), active, contract.fabrics[active], contract.provider)
    argv = ssh.as_training_account(contract, contract.head, launch(contract, settings, cuda, size, seconds))
    done = ssh.gather({contract.head: argv}, timeout=TIMEOUT)[contract.head]
    events = [event for line in done.stdout.splitlines() if (event := protocol.parse(line))]
    if failed := [event.error for event in events if isinstance(event, Failed)]:
        raise InfraError(f"GPUs: {'; '.join(sorted(set(failed)))}")
    found = next((event for event in events if isinstance(event, DevicesDone)), None)
    if found is None:
        raise InfraError(f"GPUs: {reason(done.stderr or done.stdout)}")
    return found


def reason(text: str) -> str:
    """The first line of a failed launch that says why: MPI's own summary follows."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
    said = [line for line in lines if any(word in line for word in LAST_LINES)]
    return printable((said or lines or ["no output"])[0])[:300]


def validate(env: str, contract: Contract) -> Checked:
    checked = judge(measure(env, contract, cuda=True), contract)
    if checked.problems:
        raise InfraError("; ".join(checked.problems))
    return checked


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """node, GPU, name, driver, CUDA, NCCL, product, links between the node's GPUs."""
    links = {rank["node"]: rank["links"] for rank in result["ranks"] if rank["links"]}
    return [
        (
            *(rank["node"], str(rank["local_rank"]), rank["name"], rank["driver"], rank["cuda"], rank["nccl"]),
            f"{rank['product']} right",
            ", ".join(f"{kind} x{count}" for kind, count in links.get(rank["node"], {}).items()) or "-",
        )
        for rank in result["ranks"]
    ]
