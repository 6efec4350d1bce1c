"""What this node has sent and how busy it was, from the kernel's counters. Standard library only."""

from __future__ import annotations

from pathlib import Path

# port_xmit_data counts words of four bytes.
RDMA_WORD = 4


def sent_bytes(classes: Path = Path("/sys/class")) -> dict[str, int]:
    """Bytes sent so far by each network interface, with what its card sent past the kernel by RDMA."""
    found = {
        nic.name: int((nic / "statistics/tx_bytes").read_text())
        for nic in (classes / "net").iterdir()
        if nic.name != "lo" and not nic.name.startswith("ifb")
    }
    # Not every RDMA device has this counter: EFA has others.
    for counter in sorted((classes / "infiniband").glob("*/ports/*/counters/port_xmit_data")):
        sent, port = RDMA_WORD * int(counter.read_text()), counter.parents[1]
        name = interface_of(port)
        # On InfiniBand the port counts the interface's own packets too; on Ethernet only what RDMA sent.
        whole = (port / "link_layer").read_text().strip() == "InfiniBand"
        found[name] = sent if whole else found.get(name, 0) + sent
    return found


def interface_of(port: Path) -> str:
    """The network interface of an RDMA port; the port's own name where it has none."""
    device = port.parents[1]
    nics = sorted((device / "device/net").glob("*"))
    # Ports that share one PCI device tell their interfaces apart by a number.
    own = [nic for nic in nics if int((nic / "dev_port").read_text()) == int(port.name) - 1]
    return next((nic.name for nic in own or nics), f"{device.name}/{port.name}")


def cpu_times() -> tuple[float, float]:
    """Busy and total jiffies of this machine."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, sum(fields)
