"""Whether the hosts reach each other on every fabric: another firewall, or the network, may drop their packets."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from cluster.core.errors import InfraError, UserError
from cluster.providers.baremetal.link_rate import PORT

if TYPE_CHECKING:
    from cluster.providers.baremetal.provider import Baremetal

SECONDS = 5
# Prints the addresses that it does not reach. Who refuses a connection is reached.
CONNECT = """
import concurrent.futures, socket, sys
def lost(address):
    try:
        socket.create_connection((address, int(sys.argv[1])), timeout=float(sys.argv[2])).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return False
addresses = sys.argv[3:]
with concurrent.futures.ThreadPoolExecutor(max(len(addresses), 1)) as pool:
    print(*[address for address, one in zip(addresses, pool.map(lost, addresses)) if one])
"""


def check(provider: Baremetal, guarded: Collection[str]) -> None:
    """guarded: hosts with our firewall, which does not know a new host before the deploy."""
    peers = {
        address: (host.name, fabric)
        for host in provider.hosts
        if host.name not in guarded
        for fabric, address in host.fabric_addresses.items()
    }
    words = {}
    for host in provider.hosts:
        others = [address for address, (peer, _) in peers.items() if peer != host.name]
        words[host.name] = (host, f"python3 -I - {PORT} {SECONDS} {' '.join(others)}")
    for name, done in provider.run(words, CONNECT).items():
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no answer"])[-1]
            raise InfraError(f"host {name}: cannot test whether it reaches the others: {why}")
        if lost := done.stdout.split():
            peer, fabric = peers[lost[0]]
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise UserError(
                f"host {name}: it does not reach {peer} on fabric {fabric} ({lost[0]}){more}: a firewall there (ufw, "
                "firewalld) or the network drops its packets; let all traffic pass between the fabric addresses"
            )
