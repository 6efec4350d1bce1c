"""The proof of transport: the bytes that every node must send, and the interfaces that sent them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from urllib.parse import urlsplit

from bench.catalogue import models
from bench.plan import split_engines
from bench.results.trial import Point, Traffic
from bench.sweep import nccl_log
from bench.worker.counters import below
from bench.worker.protocol import RankReport, TrialDone, one_bit_bytes
from cluster import tuning
from cluster.tuning import Tuning

# Ethernet, IP and TCP headers with timestamps: a frame of 1514 bytes has 1448 bytes of payload.
WIRE_OVERHEAD = 1514 / 1448
TOLERANCE = 0.15
# Negotiation and headers may add this share of the gradients' bytes. More is another job, or the wrong algorithm.
MAX_FIXED_SHARE = 0.10


def algorithm(point: Point, settings: Tuning) -> str:
    """How an engine adds up the gradients. Gloo's ring is flat: it does not add up inside a node first."""
    if point.compression == "1bit":
        return "all_gather"
    if point.engine in ("ps", "ps-async", "easgd"):
        return "parameter_server"
    if point.engine in split_engines.ENGINES:
        return point.engine
    if point.engine == "horovod-mpi" and point.device != "cuda":
        return tuning.all_reduce(settings, point.gpus)
    return "ring"


def share(algorithm: str, nodes: int, gpus: int) -> float:
    """Bytes that leave a node per byte of gradients, mean over nodes. Ranks are numbered node by node."""
    ranks = nodes * gpus
    match algorithm:
        case "ring" | "segmented_ring":
            return 2 * (ranks - 1) / ranks
        case "tree":
            return 2 * (nodes - 1) / nodes
        case "in_network":
            return 1.0
        case "all_gather":
            return float(ranks - 1)
        case "parameter_server":
            return 2 * gpus * (nodes - 1) / nodes
    pairs = exchanges(algorithm, ranks)
    return sum(size for source, target, size in pairs if source // gpus != target // gpus) / nodes


def exchanges(algorithm: str, ranks: int) -> Iterator[tuple[int, int, float]]:
    """Sender, receiver and share of the gradients in OpenMPI's algorithms that exchange between pairs.

    Ranks beyond a power of two first give their gradients to a neighbour, and get the sums from it at the end.
    """
    halving = algorithm == "rabenseifner"
    steps = ranks.bit_length() - 1
    rest = ranks - (1 << steps)
    for even in range(0, 2 * rest, 2):
        # With halving, the two exchange halves, then the odd one gives up its half and gets the whole at the end.
        yield even, even + 1, 1.5 if halving else 1.0
        yield even + 1, even, 1.0
    active = [*range(0 if halving else 1, 2 * rest, 2), *range(2 * rest, ranks)]
    for step in range(steps):
        for index, rank in enumerate(active):
            yield rank, active[index ^ (1 << step)], 1 / (1 << step) if halving else 1.0


def payload(
    point: Point, factor: float, shares: dict[str, float], period: int = 1, split_bytes: float | None = None
) -> float:
    """Bytes of gradients or weights that a node must send per step, mean over nodes, if it sends in every period-th.

    shares: algorithm -> share of the bytes. split_bytes: what a node sends at scale 1 where the network is split.
    """
    if point.nodes == 1:
        return 0.0
    if split_bytes is not None:
        return split_bytes / factor
    sizes = [max(1, round(n / factor)) for n, _ in models.get(point.model).gradients_in_backward_order()]
    if point.compression == "1bit":
        total = sum(map(one_bit_bytes, sizes))
    else:
        total = sum(sizes) * (2 if point.compression == "fp16" else 4)
    per_byte = sum(part * share(name, point.nodes, point.gpus_per_node) for name, part in shares.items())
    return float(total * per_byte) / period


def served_bytes(point: Point, ranks: list[RankReport]) -> float:
    """Bytes of shards per node and step, if a node of the cluster serves them to the others."""
    server = urlsplit(point.data.partition(":")[2]).hostname
    if server not in {rank.node for rank in ranks}:
        return 0.0
    sent = sum(rank.input.read_bytes for rank in ranks if rank.input and rank.node != server)
    return float(sent / len(ranks[0].steps) / point.nodes)


def counted(point: Point, rank: RankReport, interface: str, rails: set[str]) -> set[str]:
    """The counters of a node whose sum is the fabric's traffic.

    A bond and its members, a VLAN and its parent, a bridge and its port count the same bytes: the upper one counts for
    TCP. RDMA is counted by the card, so there the lowest ones count.
    """
    if point.transport == "efa":
        return {name for name in rank.sent if name.startswith("efa:")}
    named = rails or {interface}
    everything = below(named, rank.parts)
    if point.transport == "verbs":
        return {name for name in everything if name in rank.sent and not rank.parts.get(name)}
    lower = {name for one in named for name in below({one}, rank.parts) - {one}}
    return named - lower


class Counters:
    """The bytes per step of every node in one trial: on the fabric, and on what is not part of it."""

    def __init__(self, point: Point, event: TrialDone, interface: str, nccl: nccl_log.Log | None = None) -> None:
        self.fabric: dict[str, float] = {}
        self.other: dict[str, dict[str, float]] = {}
        for rank in event.ranks:
            if rank.local_rank != 0 or rank.node in self.fabric:
                continue
            rails = nccl.rails.get(rank.node.partition(".")[0], set()) if nccl else set()
            own = rank.interface or interface
            names = counted(point, rank, own, rails)
            related = below({own, *names, *rails}, rank.parts)
            self.fabric[rank.node] = sum(rank.sent.get(name, 0.0) for name in names)
            self.other[rank.node] = {nic: sent for nic, sent in rank.sent.items() if nic not in related | names}

    @property
    def mean(self) -> float:
        return sum(self.fabric.values()) / len(self.fabric)


def fixed_bytes(main: TrialDone, check: TrialDone | None, sent: float, sent_by_check: float) -> float:
    """Bytes per node and step that do not shrink with the scale factor: Horovod's negotiation and packet headers.

    At twice the scale factor half as many gradient bytes are sent, and the same fixed bytes.
    """
    if not check:
        return 0.0
    ratio = check.scale / main.scale
    return max(0.0, (ratio * sent_by_check - sent) / (ratio - 1))


def proof(
    point: Point,
    main: TrialDone,
    check: TrialDone | None,
    interface: str,
    how: str = "ring",
    nccl: nccl_log.Log | None = None,
    split_bytes: float | None = None,
) -> tuple[Traffic, str | None]:
    """Bytes per interface, and the error if they did not go over the fabric."""
    counters = Counters(point, main, interface, nccl)
    sent = counters.mean
    shares = nccl.shares(how) if nccl else {how: 1.0}
    needed = payload(point, main.scale, shares, main.period, split_bytes)
    flags = nccl.flags if nccl else 1.0
    expected = (needed * flags + served_bytes(point, main.ranks)) * WIRE_OVERHEAD
    fixed = fixed_bytes(main, check, sent, Counters(point, check, interface, nccl).mean if check else 0.0)
    traffic = Traffic(
        interface=interface,
        algorithms=shares,
        expected_bytes=expected,
        fixed_bytes=fixed,
        measured_bytes=counters.fabric,
        other_bytes=counters.other,
        nccl=nccl.networks if nccl else [],
    )
    if point.nodes == 1:
        return traffic, None
    if nccl and (problem := nccl.problem()):
        return traffic, problem
    for node, others in traffic.other_bytes.items():
        for nic, bytes_sent in others.items():
            if bytes_sent > 0.5 * expected:
                return traffic, f"traffic went over {nic} on {node}, not over {interface}"
    allowed = min(fixed, MAX_FIXED_SHARE * expected)
    if not (1 - TOLERANCE) * expected <= sent <= (1 + TOLERANCE) * (expected + allowed):
        wanted = f"{expected / 1e6:.2f} MB plus {allowed / 1e6:.2f} MB of negotiation, within {TOLERANCE:.0%}"
        return traffic, f"{interface} sent {sent / 1e6:.2f} MB per node and step, expected {wanted}"
    return traffic, None


def excess(point: Point, traffic: Traffic) -> str | None:
    """The node that sent more than its gradients need, if one did.

    Negotiation may explain it. So may other traffic: it does not halve at twice the scale factor either.
    """
    if point.nodes == 1 or point.data != "synthetic":
        return None
    node, sent = max(traffic.measured_bytes.items(), key=itemgetter(1))
    if sent <= (1 + TOLERANCE) * traffic.expected_bytes:
        return None
    needed = traffic.expected_bytes / 1e6
    return f"{traffic.interface} on {node} sent {sent / 1e6:.2f} MB per step, its gradients need {needed:.2f} MB"
