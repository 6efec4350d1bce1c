"""Run on the head: is every node reachable over the fabric, does each ring neighbour get its rate, does MPI add up?

Prints JSON; exits 1 with one line that names the node when something is wrong.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOLERANCE = 0.10
SECONDS = 1
# Other work on a shared machine can only make a measurement smaller, so the best of some counts.
TRIES = 5
PORT = 30500


def on(node, *command, timeout=30):
    local = node == socket.gethostname()
    argv = list(command) if local else ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", node, *command]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", "timed out")


def measure(pair):
    """Payload rate from one node to the next in Gbit/s, or 0 and what went wrong."""
    sender, receiver, port = pair
    server = on(receiver, "iperf3", "-s", "-1", "-D", "-p", str(port))
    if server.returncode:
        return 0.0, f"{receiver}: {server.stderr.strip() or 'no answer over the fabric'}"
    time.sleep(0.1)
    done = on(sender, "iperf3", "-c", receiver, "-p", str(port), "-t", str(SECONDS), "-J")
    try:
        return json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 1e9, ""
    except (json.JSONDecodeError, KeyError):
        return 0.0, f"{sender}: {done.stderr.strip() or done.stdout.strip()[-200:]}"


def wire_share(interface):
    """Bytes on the wire per byte of payload: Ethernet, IP and TCP headers."""
    mtu = int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    return (mtu + 14) / (mtu - 52)


def restore_rates(nodes):
    """A sweep that was killed leaves its own rate behind."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(lambda node: on(node, "sudo", "-n", "/usr/local/sbin/fabric-rate", "reset"), nodes))


def measure_ring(pairs, good):
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(pairs, pool.map(measure, pairs), strict=True))
    for pair in pairs:
        for _ in range(TRIES - 1):
            if good(found[pair][0]):
                break
            again = measure(pair)
            found[pair] = max(found[pair], again)
    return found


def check_mpi(nodes):
    """What MPI said, and whether that is right."""
    hosts = ",".join(f"{node}:1" for node in nodes)
    try:
        done = subprocess.run(["mpirun", "-H", hosts, "mpi-hello"], capture_output=True, text=True, timeout=60)
        result = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return "no answer within 60 s", False
    except json.JSONDecodeError:
        return f"failed: {done.stderr.strip()[-300:]}", False
    text = f"{result['ranks']} ranks, sum {result['sum']}, {result['wrong']} wrong"
    return text, result["sum"] == len(nodes) * (len(nodes) - 1) // 2 and result["wrong"] == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--fabric", required=True)
    parser.add_argument("--interface", required=True)
    parser.add_argument("--rate-gbps", type=float, required=True)
    parser.add_argument("--mpi", choices=["yes", "no"], required=True)
    args = parser.parse_args()
    nodes = args.nodes.split(",")
    share = wire_share(args.interface)

    def good(gbps):
        return abs(gbps * share / args.rate_gbps - 1) <= TOLERANCE

    neighbours = zip(nodes, nodes[1:] + nodes[:1], strict=True) if len(nodes) > 1 else []
    pairs = [(a, b, PORT + i) for i, (a, b) in enumerate(neighbours)]
    problems, ring = [], []
    restore_rates(nodes)
    for (a, b, _), (gbps, problem) in measure_ring(pairs, good).items():
        ring.append({"node": a, "to": b, "gbps": round(gbps, 3), "wire_gbps": round(gbps * share, 3)})
        if problem and not gbps:
            problems.append(problem)
        elif not good(gbps):
            wire = f"{gbps * share:.2f} Gbit/s on the wire"
            problems.append(f"{a} to {b}: {wire}, expected {args.rate_gbps:g} within {TOLERANCE:.0%}")
    mpi = "not tried: one node" if args.mpi == "no" else "not tried"
    if args.mpi == "yes" and not problems:
        mpi, right = check_mpi(nodes)
        if not right:
            problems.append(f"MPI: {mpi}")
    result = {"ok": not problems, "fabric": args.fabric, "rate_gbps": args.rate_gbps, "ring": ring, "mpi": mpi}
    print(json.dumps({**result, "problems": problems}))
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
