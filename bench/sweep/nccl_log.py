"""Parse the networks that NCCL uses from its log (NCCL_DEBUG=INFO)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

LINE = r"([\w.-]+):\d+:\d+ \[\d+\] NCCL INFO "
# host:1:2 [0] NCCL INFO Channel 00/0 : 3[0] -> 4[0] [send] via NET/IB/0/GDRDMA
SENDS = re.compile(LINE + r".*\[send\] via NET/([^/]+)/")
# host:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.0.1.1<0>
SOCKETS = re.compile(LINE + r"NET/Socket : Using (.*)")
INTERFACE = re.compile(r"\[\d+\]([^:\s]+):")


@dataclass
class Log:
    """The log of one launch on a fabric."""

    transport: str
    interface: str
    sends: dict[str, set[str]] = field(default_factory=dict)
    sockets: dict[str, set[str]] = field(default_factory=dict)

    def read(self, line: str) -> None:
        if match := SENDS.search(line):
            self.sends.setdefault(match[1], set()).add(match[2])
        elif match := SOCKETS.search(line):
            self.sockets.setdefault(match[1], set()).update(INTERFACE.findall(match[2]))

    @property
    def networks(self) -> list[str]:
        return sorted(set().union(*self.sends.values()))

    def problem(self) -> str | None:
        """One line on the first host whose NCCL did not use the fabric; None if all did."""
        for host, networks in sorted(self.sends.items()):
            if "Socket" not in networks:
                continue
            if self.transport != "tcp":
                return f"NCCL sent over sockets on {host} (NET/Socket), not {self.transport} on {self.interface}"
            used = self.sockets.get(host, set())
            if used and self.interface not in used:
                return f"NCCL sent over {', '.join(sorted(used))} on {host}, not over {self.interface}"
        return None
