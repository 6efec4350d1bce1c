"""Measure goodput between ring neighbours with iperf3, one pair at a time. Runs on the head as the training account.

    links SECONDS NODE=ADDRESS NODE=ADDRESS ...

ADDRESS is the node's on the fabric to measure; SSH may use another one.

Prints a JSON list of {node, to, gbps}. Standard library only.
"""

import json
import socket
import subprocess
import sys
import time

PORT = 30500


def run_on(node: str, *command: str) -> str:
    local = node == socket.gethostname()
    argv = list(command) if local else ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", node, *command]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if done.returncode:
        sys.exit(f"{node}: {command[0]}: {reason(done.stdout, done.stderr)}")
    return done.stdout


def reason(out: str, err: str) -> str:
    """Why a command failed. With -J, iperf3 reports its errors inside its JSON."""
    try:
        return str(json.loads(out)["error"])
    except (KeyError, TypeError, ValueError):
        return ((err or out).strip().splitlines() or ["no output"])[-1][-300:]


def main() -> None:
    seconds, addresses = sys.argv[1], dict(word.split("=") for word in sys.argv[2:])
    nodes = list(addresses)
    rows = []
    for i, (sender, receiver) in enumerate(zip(nodes, [*nodes[1:], nodes[0]], strict=True)):
        run_on(receiver, "iperf3", "-s", "-1", "-D", "-p", str(PORT + i))
        time.sleep(0.2)
        report = json.loads(
            run_on(sender, "iperf3", "-c", addresses[receiver], "-p", str(PORT + i), "-t", seconds, "-J")
        )
        gbps = report["end"]["sum_received"]["bits_per_second"] / 1e9
        rows.append({"node": sender, "to": receiver, "gbps": gbps})
    print(json.dumps(rows))
