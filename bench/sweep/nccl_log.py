"""What NCCL says, with NCCL_DEBUG=INFO, of the network it sends over."""

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
    """Of one launch on a fabric."""

    transport: str
    interface: str
    sends: dict[str, set[str]] = field(default_factory=dict)
    sockets: dict[str, set[str]] = field(default_factory=dict)

    def read(self, line: str) -> None:
        if found := SENDS.search(line):
            self.sends.setdefault(found[1], set()).add(found[2])
        elif found := SOCKETS.search(line):
            self.sockets.setdefault(found[1], set()).update(INTERFACE.findall(found[2]))

    @property
    def networks(self) -> list[str]:
        return sorted(set().union(*self.sends.values()))

    def problem(self) -> str | None:
        """Where it did not send as the fabric is meant to be used, in a line."""
        for host, networks in sorted(self.sends.items()):
            if "Socket" not in networks:
                continue
            if self.transport != "tcp":
                return (
                    f"NCCL sent over sockets on {host} (NET/Socket), not over the {self.transport} of {self.interface}"
                )
            used = self.sockets.get(host, set())
            if used and self.interface not in used:
                return f"NCCL sent over {', '.join(sorted(used))} on {host} and not over {self.interface}"
        return None
