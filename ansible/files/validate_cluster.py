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

TOLERANCE = 0.10
SECONDS = 1
PORT = 30500


def on(node, *command, timeout=30):
    local = node == socket.gethostname()
    argv = list(command) if local else ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", node, *command]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", "timed out")


def measure(pair):
    """Goodput in Gbit/s from one node to the next; the better of two tries, since the machine may be shared."""
    sender, receiver, port = pair
    best, problem = 0.0, ""
    for _ in range(3):
        server = on(receiver, "iperf3", "-s", "-1", "-D", "-p", str(port))
        if server.returncode:
            return 0.0, f"{receiver}: {server.stderr.strip() or 'no answer over the fabric'}"
        time.sleep(0.1)
        done = on(sender, "iperf3", "-c", receiver, "-p", str(port), "-t", str(SECONDS), "-J")
        try:
            best = max(best, json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 1e9)
        except (json.JSONDecodeError, KeyError):
            problem = f"{sender}: {done.stderr.strip() or done.stdout.strip()[-200:]}"
            continue
        if abs(best / RATE - 1) <= TOLERANCE:
            break
    return best, "" if best else problem


def main():
    global RATE
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--fabric", required=True)
    parser.add_argument("--rate-gbps", type=float, required=True)
    parser.add_argument("--mpi", choices=["yes", "no"], required=True)
    args = parser.parse_args()
    RATE = args.rate_gbps
    nodes = args.nodes.split(",")
    pairs = (
        [(a, b, PORT + i) for i, (a, b) in enumerate(zip(nodes, nodes[1:] + nodes[:1], strict=True))]
        if len(nodes) > 1
        else []
    )
    problems, ring = [], []
    with ThreadPoolExecutor(2) as pool:
        for (a, b, _), (gbps, problem) in zip(pairs, pool.map(measure, pairs), strict=True):
            ring.append({"node": a, "to": b, "gbps": round(gbps, 3)})
            if problem:
                problems.append(problem)
            elif abs(gbps / RATE - 1) > TOLERANCE:
                problems.append(f"{a} to {b}: {gbps:.2f} Gbit/s, expected {RATE:g} within {TOLERANCE:.0%}")
    mpi = "not tried: one node"
    if args.mpi == "yes" and not problems:
        hosts = ",".join(f"{node}:1" for node in nodes)
        done = subprocess.run(["mpirun", "-H", hosts, "mpi-hello"], capture_output=True, text=True, timeout=60)
        expected = len(nodes) * (len(nodes) - 1) // 2
        try:
            result = json.loads(done.stdout)
        except json.JSONDecodeError:
            result = {}
        mpi = f"{result.get('ranks')} ranks, sum {result.get('sum')}, {result.get('wrong')} wrong"
        if result.get("sum") != expected or result.get("wrong") != 0:
            problems.append(f"MPI: {mpi}; {done.stderr.strip()[-300:]}")
    print(
        json.dumps(
            {
                "ok": not problems,
                "fabric": args.fabric,
                "rate_gbps": RATE,
                "ring": ring,
                "mpi": mpi,
                "problems": problems,
            }
        )
    )
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
