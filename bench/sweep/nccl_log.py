"""Parse the networks, rails and algorithms that NCCL uses from its log (NCCL_DEBUG=INFO)."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

# INIT names the networks, TUNING the algorithm of every collective.
SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET,TUNING"
LINE = r"([\w.-]+):\d+:\d+ \[\d+\] NCCL INFO "
# host:1:2 [0] NCCL INFO Channel 00/0 : 3[0] -> 4[0] [send] via NET/IB/0/GDRDMA
SENDS = re.compile(LINE + r".*\[send\] via NET/([^/]+)/")
# host:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.0.1.1<0>
# host:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_2:1/RoCE [RO]; OOB ib0:10.0.0.1<0>
USING = re.compile(LINE + r"NET/(Socket|IB)\w* ?: Using (.*)")
INTERFACE = re.compile(r"\[\d+\]([^:\s]+):([0-9.]*)")
PORT = re.compile(r"([\w-]+):(\d+)/(?:IB|RoCE)")
# Up to 2.23: "1024 Bytes -> Algo 1 proto 2 time 34.6". Later: "AllReduce: 1024 Bytes -> Algo RING proto SIMPLE ...".
CHOICE = re.compile(r"NCCL INFO (?:AllReduce: )?(\d+) Bytes -> Algo (\w+) proto (\w+)")
# NCCL's numbers and names; a sum in the switch sends every byte once.
ALGORITHMS = {
    "0": "tree",
    "TREE": "tree",
    "1": "ring",
    "RING": "ring",
    "2": "in_network",
    "COLLNET_DIRECT": "in_network",
    "3": "in_network",
    "COLLNET_CHAIN": "in_network",
    "4": "in_network",
    "NVLS": "in_network",
    "5": "tree",
    "NVLS_TREE": "tree",
}
# Protocols for small messages send flags between the data: 4 bytes per 4 bytes, or 8 per 120.
FLAGS = {"0": 2.0, "LL": 2.0, "1": 128 / 120, "LL128": 128 / 120}
# The network that a transport needs; plugins add to the name: IBext_v8, AWS Libfabric.
NETWORKS = {"tcp": "Socket", "verbs": "IB", "efa": "Libfabric"}


@dataclass
class Log:
    """The log of one launch on a fabric."""

    transport: str
    interface: str
    subnet: str
    sends: dict[str, set[str]] = field(default_factory=dict)
    sockets: dict[str, dict[str, str]] = field(default_factory=dict)
    ports: dict[str, set[str]] = field(default_factory=dict)
    algorithm_bytes: dict[str, int] = field(default_factory=dict)
    bytes_with_flags: float = 0.0

    def read(self, line: str) -> None:
        if match := SENDS.search(line):
            self.sends.setdefault(match[1], set()).add(match[2])
        elif (match := USING.search(line)) and match[2] == "Socket":
            self.sockets.setdefault(match[1], {}).update(INTERFACE.findall(match[3]))
        elif match:
            used = match[3].partition("; OOB")[0]
            self.ports.setdefault(match[1], set()).update(":".join(port) for port in PORT.findall(used))
        elif (match := CHOICE.search(line)) and (name := ALGORITHMS.get(match[2].upper())):
            size = int(match[1])
            self.algorithm_bytes[name] = self.algorithm_bytes.get(name, 0) + size
            self.bytes_with_flags += size * FLAGS.get(match[3].upper(), 1.0)

    def start_trial(self) -> None:
        """Forget the algorithms of the trial before: they depend on the sizes of its messages."""
        self.algorithm_bytes.clear()
        self.bytes_with_flags = 0.0

    @property
    def networks(self) -> list[str]:
        return sorted(set().union(*self.sends.values()))

    @property
    def rails(self) -> dict[str, set[str]]:
        """Host -> interfaces or RDMA ports that NCCL sends on."""
        found = self.sockets if self.transport == "tcp" else self.ports if self.transport == "verbs" else {}
        return {host.partition(".")[0]: set(names) for host, names in found.items() if host in self.sends}

    def shares(self, otherwise: str) -> dict[str, float]:
        """Algorithm -> share of the bytes. NCCL's log names none if another library sent the gradients."""
        total = sum(self.algorithm_bytes.values())
        return {name: size / total for name, size in self.algorithm_bytes.items()} if total else {otherwise: 1.0}

    @property
    def flags(self) -> float:
        """Bytes that leave a GPU, flags included, per byte of gradients."""
        total = sum(self.algorithm_bytes.values())
        return self.bytes_with_flags / total if total else 1.0

    def on_fabric(self, name: str, address: str) -> bool:
        """By its address: the card has other names on other hosts. Jobs that share no subnet have only its name."""
        if not self.subnet:
            return name == self.interface
        return address != "" and ipaddress.ip_address(address) in ipaddress.ip_network(self.subnet)

    def problem(self) -> str | None:
        """One line on the first host whose NCCL did not use the fabric; None if all did."""
        wanted = NETWORKS[self.transport]
        for host, networks in sorted(self.sends.items()):
            for network in sorted(networks):
                if wanted not in network:
                    return f"NCCL sent over NET/{network} on {host}, not over {self.transport} on {self.interface}"
            used = self.sockets.get(host, {})
            if self.transport == "tcp" and used and not any(self.on_fabric(*card) for card in used.items()):
                return f"NCCL sent over {', '.join(sorted(used))} on {host}, not over {self.interface}"
        return None
