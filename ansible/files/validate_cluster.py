"""Run on the head: is every node reachable over the fabric, does each ring neighbour get its rate, does MPI add up?

Prints JSON; exits 1 with one line that names the node when something is wrong.
"""

import argparse
import json
import socket
import subprocess
import sys
from pathlib import Path

TOLERANCE = 0.10
# How long a pair of nodes is measured; below that share of the rate a pair is tried again, at most so often.
MILLISECONDS = 200
ENOUGH = 0.95
TRIES = 20
PATIENCE = 120


def wire_share(interface):
    """Bytes on the wire per byte of payload: Ethernet, IP and TCP headers."""
    mtu = int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    return (mtu + 14) / (mtu - 52)


def unreachable(nodes):
    found = []
    for node in nodes:
        try:
            socket.create_connection((node, 22), timeout=5).close()
        except OSError as error:
            found.append(f"{node}: no answer over the fabric: {error}")
    return found


def measure(nodes, low, high):
    """What mpi-hello found on all nodes, and what went wrong."""
    # A sweep that was killed leaves its own rate behind, and connections keep the packet size that is set when they
    # are made: the rate comes first.
    command = 'sudo -n /usr/local/sbin/fabric-rate reset; exec mpi-hello "$@"'
    words = [str(MILLISECONDS), f"{low:.6f}", f"{high:.6f}", str(TRIES)]
    argv = ["mpirun", "-H", ",".join(f"{node}:1" for node in nodes), "sh", "-c", command, "mpi-hello", *words]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
        return json.loads(done.stdout), ""
    except subprocess.TimeoutExpired:
        return None, f"MPI: no answer within {PATIENCE} s"
    except json.JSONDecodeError:
        return None, f"MPI: failed: {' '.join(done.stderr.split())[-400:]}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--fabric", required=True)
    parser.add_argument("--interface", required=True)
    parser.add_argument("--rate-gbps", type=float, required=True)
    args = parser.parse_args()
    nodes = args.nodes.split(",")
    share = wire_share(args.interface)
    ring, mpi, problems = [], "not tried", unreachable(nodes)
    if not problems:
        low, high = ENOUGH * args.rate_gbps / share, (1 + TOLERANCE) * args.rate_gbps / share
        found, problem = measure(nodes, low, high)
        if problem:
            problems.append(problem)
        else:
            mpi = f"{found['ranks']} ranks, sum {found['sum']}, {found['wrong']} wrong"
            if found["sum"] != len(nodes) * (len(nodes) - 1) // 2 or found["wrong"]:
                problems.append(f"MPI: {mpi}")
            neighbours = zip(nodes, nodes[1:] + nodes[:1], found["gbps"], strict=True) if len(nodes) > 1 else ()
            for a, b, gbps in neighbours:
                ring.append({"node": a, "to": b, "gbps": gbps, "wire_gbps": round(gbps * share, 4)})
                if abs(gbps * share / args.rate_gbps - 1) > TOLERANCE:
                    wire = f"{gbps * share:.2f} Gbit/s on the wire"
                    problems.append(f"{a} to {b}: {wire}, expected {args.rate_gbps:g} within {TOLERANCE:.0%}")
    result = {"ok": not problems, "fabric": args.fabric, "rate_gbps": args.rate_gbps, "ring": ring, "mpi": mpi}
    print(json.dumps({**result, "problems": problems}))
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
