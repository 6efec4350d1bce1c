"""Run on the head: is every node reachable over the fabric, does each ring neighbour get its rate, does MPI add up, and
does every node see what the head writes to the share?

Prints JSON; exits 1 with one line that names the node when something is wrong.
"""

import argparse
import json
import secrets
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

TOLERANCE = 0.10
# How long a pair of nodes is measured; below that share of the rate a pair is tried again, at most so often.
MILLISECONDS = 200
ENOUGH = 0.92
TRIES = 20
PATIENCE = 120
# A share is mounted while the deploy goes on; a node that has just come may need this long.
SHARE_PATIENCE = 60
# Each rank prints what it reads in the share, before it measures.
LOOK = """
end=$(($(date +%s) + PATIENCE))
until found=$(cat "$file" 2>/dev/null) || [ "$(date +%s)" -ge $end ]; do sleep 0.3; done
echo "share $OMPI_COMM_WORLD_RANK $found"
""".replace("PATIENCE", str(SHARE_PATIENCE))


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


def write_token(share):
    """A file that was never there before, and what it holds; None when the share does not take it."""
    file, token = Path(share) / "results" / f".validate-{secrets.token_hex(8)}", secrets.token_hex(8)
    end = time.monotonic() + SHARE_PATIENCE
    while True:
        try:
            file.write_text(token)
            return file, token, ""
        except OSError as error:
            if time.monotonic() > end:
                return None, "", f"share: {error.filename or share}: {error.strerror}; see journalctl -u shared-storage"
        time.sleep(0.3)


def measure(nodes, low, high, file):
    """What mpi-hello found on all nodes, what each read in the share's file, and what went wrong."""
    # A sweep that was killed leaves its own rate behind, and connections keep the packet size that is set when they
    # are made: the rate comes first.
    look = f"file={shlex.quote(str(file))}{LOOK}" if file else ""
    command = f'sudo -n /usr/local/sbin/fabric-rate reset; {look}exec mpi-hello "$@"'
    words = [str(MILLISECONDS), f"{low:.6f}", f"{high:.6f}", str(TRIES)]
    argv = ["mpirun", "-H", ",".join(f"{node}:1" for node in nodes), "sh", "-c", command, "mpi-hello", *words]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
        lines = done.stdout.splitlines()
        seen = {nodes[int(line.split()[1])]: line.split()[2:] for line in lines if line.startswith("share ")}
        return json.loads("".join(line for line in lines if line.startswith("{"))), seen, ""
    except subprocess.TimeoutExpired:
        return None, {}, f"MPI: no answer within {PATIENCE} s"
    except json.JSONDecodeError:
        return None, {}, f"MPI: failed: {' '.join(done.stderr.split())[-400:]}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--fabric", required=True)
    parser.add_argument("--interface", required=True)
    parser.add_argument("--rate-gbps", type=float, required=True)
    parser.add_argument("--share", default="")
    args = parser.parse_args()
    nodes = args.nodes.split(",")
    share = wire_share(args.interface)
    ring, mpi, seen, problems = [], "not tried", [], unreachable(nodes)
    if not problems:
        low, high = ENOUGH * args.rate_gbps / share, (1 + TOLERANCE) * args.rate_gbps / share
        file, token, problem = write_token(args.share) if args.share else (None, "", "")
        if problem:
            problems.append(problem)
        try:
            found, read, problem = measure(nodes, low, high, file)
        finally:
            if file:
                file.unlink()
        if file:
            seen = [node for node in nodes if read.get(node) == [token]]
            unseen = f"{args.share}: what the head wrote cannot be read here; see journalctl -u shared-storage"
            problems += [f"{node}: {unseen}" for node in nodes if node not in seen and not problem]
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
    result["share"] = {"path": args.share, "read_on": seen} if args.share else None
    print(json.dumps({**result, "problems": problems}))
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
