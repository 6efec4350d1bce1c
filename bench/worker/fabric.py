"""The card of a launch's fabric on this node, and the settings that name it. Standard library only.

    fabric COMMAND ARGUMENTS       replaces this process by another program, on the launch's fabric

Cards have other names on other nodes, so the fabric's subnet finds them. Names are exact: `eth1` alone would also match
eth10 in NCCL.
"""

import array
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from bench.worker import counters

# What the launcher tells every rank: transport and subnet.
VARIABLE = "HOROVOD_CLUSTER_FABRIC"
SIOCGIFCONF = 0x8912
# struct ifreq: 16 bytes of name, then a sockaddr_in whose address begins at byte 20.
ENTRY, ADDRESS = 40, 20


def addresses() -> list[tuple[str, str]]:
    """(interface, IPv4 address) of this node; an interface with two addresses is there twice."""
    buffer = array.array("B", bytes(ENTRY * 1024))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        answer = fcntl.ioctl(ask.fileno(), SIOCGIFCONF, struct.pack("iL", len(buffer), buffer.buffer_info()[0]))
    content = buffer.tobytes()[: struct.unpack_from("i", answer)[0]]
    entries = [content[at : at + ENTRY] for at in range(0, len(content), ENTRY)]
    # A label such as eth0:1 is an address of eth0.
    return [
        (one[:16].split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(one[ADDRESS : ADDRESS + 4]))
        for one in entries
    ]


def interface(subnet: str, found: list[tuple[str, str]]) -> str:
    network = ipaddress.ip_network(subnet)
    for name, address in found:
        if ipaddress.ip_address(address) in network:
            return name
    raise SystemExit(f"Error: {socket.gethostname()}: no interface has an address in {subnet}")


def adapters(name: str, classes: Path = Path("/sys/class")) -> list[str]:
    """RDMA ports of an interface, such as mlx5_0:1; those of its members for a bond or VLAN."""
    parts = counters.parts(classes)
    own = counters.below({name}, parts)
    return sorted(port for port, lower in parts.items() if ":" in port and own & set(lower))


def settings(transport: str, name: str, ports: list[str]) -> dict[str, str]:
    """Variables that depend on the node; bench/sweep/launch.py sets those that do not."""
    values = {"HOROVOD_GLOO_IFACE": name, "GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    if transport == "verbs":
        if not ports:
            raise SystemExit(f"Error: {socket.gethostname()}: {name} has no RDMA adapter, which transport verbs needs")
        values |= {"NCCL_IB_HCA": f"={','.join(ports)}", "UCX_NET_DEVICES": ",".join(ports)}
    return values


def of_launch(environment: Mapping[str, str] = os.environ) -> str:
    """The interface of the launch's fabric on this node; "" if the launch names no fabric."""
    subnet = environment.get(VARIABLE, "").partition(" ")[2]
    return interface(subnet, addresses()) if subnet else ""


def use(environment: MutableMapping[str, str] = os.environ) -> None:
    """Send collectives over the launch's fabric: before the first use of Gloo, NCCL or MPI, which read this once."""
    if name := of_launch(environment):
        transport = environment[VARIABLE].partition(" ")[0]
        environment.update(settings(transport, name, adapters(name) if transport == "verbs" else []))


def main() -> None:
    use()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 (no shell)
