"""Bytes sent and CPU time of this node, from kernel counters. Standard library only."""

from pathlib import Path

# port_xmit_data counts 4-byte words.
RDMA_WORD = 4


def sent_bytes(classes: Path = Path("/sys/class")) -> dict[str, int]:
    """Bytes sent by each network interface so far, including RDMA traffic, which bypasses the kernel."""
    totals = {
        nic.name: int((nic / "statistics/tx_bytes").read_text())
        for nic in (classes / "net").iterdir()
        if nic.name != "lo" and not nic.name.startswith("ifb")
    }
    for counter in sorted((classes / "infiniband").glob("*/ports/*/counters/port_xmit_data")):
        sent, port = RDMA_WORD * int(counter.read_text()), counter.parents[1]
        name = interface_of(port)
        # An InfiniBand port also counts the interface's IP packets; an Ethernet port counts RDMA only.
        includes_ip = (port / "link_layer").read_text().strip() == "InfiniBand"
        totals[name] = sent if includes_ip else totals.get(name, 0) + sent
    # EFA devices have a counter of their own and no interface.
    for counter in sorted((classes / "infiniband").glob("*/ports/*/hw_counters/tx_bytes")):
        if not (counter.parents[1] / "counters/port_xmit_data").exists():
            totals[f"efa:{counter.parents[3].name}"] = int(counter.read_text())
    return totals


def parts(classes: Path = Path("/sys/class")) -> dict[str, list[str]]:
    """What a name consists of: a bond, VLAN or bridge of the interfaces below it, an RDMA port of its interface."""
    found = {
        nic.name: sorted(lower.name.removeprefix("lower_") for lower in nic.glob("lower_*"))
        for nic in (classes / "net").iterdir()
    }
    for port in sorted((classes / "infiniband").glob("*/ports/*")):
        found[f"{port.parents[1].name}:{port.name}"] = [interface_of(port)]
    return {name: names for name, names in found.items() if names}


def below(names: set[str], parts: dict[str, list[str]]) -> set[str]:
    """These names and everything that they consist of."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        if (name := pending.pop()) not in found:
            found.add(name)
            pending += parts.get(name, [])
    return found


def interface_of(port: Path) -> str:
    """The network interface of an RDMA port, or the port's own name if it has no interface."""
    device = port.parents[1]
    nics = sorted((device / "device/net").glob("*"))
    # The interfaces of all ports of a PCI device are listed together; dev_port tells them apart.
    own = [nic for nic in nics if int((nic / "dev_port").read_text()) == int(port.name) - 1]
    return next((nic.name for nic in own or nics), f"{device.name}/{port.name}")


def cpu_times() -> tuple[float, float]:
    """Busy and total jiffies of this machine."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)
