"""The rate of fabrics with `rate_gbps: auto` on existing machines: what the drivers tell, otherwise measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cluster.core import files
from cluster.core.errors import UserError
from cluster.core.progress import Progress
from cluster.core.state import State, write_file

if TYPE_CHECKING:
    from cluster.providers.baremetal.provider import Baremetal

# The same as in ansible/files/validate_cluster.py: our firewall lets it pass between nodes.
PORT, STREAMS, SECONDS = 30499, 8, 3
# Both ends run this: with the address to receive on, or with that address and "send". The receiver prints the rate on
# the wire, Ethernet headers included, in Gbit/s.
MEASURE = """
import selectors, socket, sys, threading, time
address, port, streams, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
if sys.argv[5:] == ["send"]:
    def send(end=time.monotonic() + 15):
        while True:
            try:
                link = socket.create_connection((address, port), timeout=3)
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
        link.settimeout(10)
        block, end = bytes(1 << 20), time.monotonic() + seconds
        while time.monotonic() < end:
            link.sendall(block)
        link.close()
    many = [threading.Thread(target=send) for _ in range(streams)]
    for one in many: one.start()
    for one in many: one.join()
else:
    server = socket.create_server((address, port))
    server.settimeout(20)
    links = [server.accept()[0] for _ in range(streams)]
    segment = links[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    wait, buffer, total = selectors.DefaultSelector(), bytearray(1 << 20), 0
    for link in links:
        wait.register(link, selectors.EVENT_READ)
    begin = time.monotonic()
    while wait.get_map():
        ready = wait.select(15)
        if not ready:
            sys.exit("no data for 15 s")
        for key, _ in ready:
            count = key.fileobj.recv_into(buffer)
            total += count
            if not count:
                wait.unregister(key.fileobj)
    print(8e-9 * total / (time.monotonic() - begin) * (segment + 66) / segment)
"""


def known(state: State) -> dict[str, float]:
    """Gbit/s of each fabric; {} before the first deploy."""
    file = state.dir / "rates.json"
    return {name: one["gbps"] for name, one in files.mapping(file).items()} if file.exists() else {}


def find(
    provider: Baremetal,
    cards: Mapping[str, Mapping[str, str]],
    speeds: Mapping[str, Mapping[str, int]],
    progress: Progress,
) -> None:
    """Record the rate of every fabric with `auto`. cards: host -> fabric -> card; speeds: host -> card -> Mbit/s.

    A measured rate is kept while the cards are the same: a rate that changed at every deploy would change the nodes.
    """
    file = provider.state.dir / "rates.json"
    before = files.mapping(file) if file.exists() else {}
    found = {}
    for name, fabric in provider.cluster.fabrics.items():
        if fabric.rate_gbps != "auto":
            continue
        used = {host: one[name] for host, one in cards.items()}
        told = [speeds[host].get(card) for host, card in used.items()]
        if all(told):
            gbps = min(speed for speed in told if speed) / 1000
            progress(f"fabric {name}: {gbps:g} Gbit/s, as the drivers of the cards tell")
        elif name in before and before[name]["cards"] == used:
            gbps = before[name]["gbps"]
        else:
            with progress.part("rate", f"measuring fabric {name}"):
                gbps = measure(provider, name)
            progress(f"fabric {name}: {gbps:g} Gbit/s, measured between the first two hosts")
        found[name] = {"gbps": gbps, "cards": used}
    write_file(file, json.dumps(found))


def measure(provider: Baremetal, fabric: str) -> float:
    """Between the first two hosts, with three digits. Validation checks the other links."""
    field = f"cluster.fabrics.{fabric}.rate_gbps: auto"
    if len(provider.hosts) < 2:
        raise UserError(f"{field}: the driver of the card does not tell its rate; write the rate in Gbit/s")
    one, other = provider.hosts[:2]
    words = f"python3 -I - {other.fabric_addresses[fabric]} {PORT} {STREAMS} {SECONDS}"
    answers = provider.run({other.name: (other, words), one.name: (one, f"{words} send")}, MEASURE)
    try:
        return float(f"{float(answers[other.name].stdout):.3g}")
    except ValueError:
        why = (answers[one.name].stderr.strip() or answers[other.name].stderr.strip() or "no answer").splitlines()[-1]
        raise UserError(
            f"{field}: the drivers of the cards do not tell it, and measuring it from {one.name} to {other.name} "
            f"(port {PORT}) failed: {why}; write the rate in Gbit/s"
        ) from None
