"""Validates the cluster from its head: every node is reachable over the fabric, each ring neighbour gets its rate, MPI
sums correctly, and every node reads what the head writes to the share.

Prints JSON. Exits with 1 and one line that names the node if a check fails.
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
# Duration of one measurement. A pair below this fraction of the rate is measured again, up to this many times.
MEASURE_MS = 200
RETRY_BELOW = 0.92
TRIES = 20
MPI_TIMEOUT = 120
# The deploy does not wait for the mount; on a new node it may take this long.
SHARE_TIMEOUT = 60
# Before it measures, each rank prints what it reads from the share.
READ_SHARE = """
end=$(($(date +%s) + TIMEOUT))
until found=$(cat "$file" 2>/dev/null) || [ "$(date +%s)" -ge $end ]; do sleep 0.3; done
echo "share $OMPI_COMM_WORLD_RANK $found"
""".replace("TIMEOUT", str(SHARE_TIMEOUT))


def wire_overhead(interface):
    """Bytes on the wire per byte of payload: Ethernet, IP and TCP headers."""
    mtu = int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    return (mtu + 14) / (mtu - 52)


def unreachable(nodes):
    found = []
    for node in nodes:
        try:
            socket.create_connection((node, 22), timeout=5).close()
        except OSError as error:
            found.append(f"{node}: SSH port unreachable over the fabric: {error}")
    return found


def write_token(share):
    """Write a new file to the share. Returns its path (None on failure), its content and the problem."""
    file, token = Path(share) / "results" / f".validate-{secrets.token_hex(8)}", secrets.token_hex(8)
    end = time.monotonic() + SHARE_TIMEOUT
    while True:
        try:
            file.write_text(token)
            return file, token, ""
        except OSError as error:
            if time.monotonic() > end:
                return None, "", f"share: {error.filename or share}: {error.strerror}; see journalctl -u shared-storage"
        time.sleep(0.3)


def measure(nodes, low, high, file):
    """Run mpi-hello on all nodes. Returns its result, what each node read from the share, and the problem."""
    # Reset the rate first: a killed sweep leaves its own rate, and a connection keeps the packet size it started with.
    read = f"file={shlex.quote(str(file))}{READ_SHARE}" if file else ""
    command = f'sudo -n /usr/local/sbin/fabric-rate reset; {read}exec mpi-hello "$@"'
    words = [str(MEASURE_MS), f"{low:.6f}", f"{high:.6f}", str(TRIES)]
    argv = ["mpirun", "-H", ",".join(f"{node}:1" for node in nodes), "sh", "-c", command, "mpi-hello", *words]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=MPI_TIMEOUT)
        lines = done.stdout.splitlines()
        seen = {nodes[int(line.split()[1])]: line.split()[2:] for line in lines if line.startswith("share ")}
        return json.loads("".join(line for line in lines if line.startswith("{"))), seen, ""
    except subprocess.TimeoutExpired:
        return None, {}, f"MPI: mpi-hello timed out after {MPI_TIMEOUT} s"
    except json.JSONDecodeError:
        return None, {}, f"MPI: mpi-hello failed: {' '.join(done.stderr.split())[-400:]}"


def main():
    parser = argparse.ArgumentParser()
    for name in ("--nodes", "--fabric", "--interface"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rate-gbps", type=float, required=True)
    parser.add_argument("--share", default="")
    args = parser.parse_args()
    nodes = args.nodes.split(",")
    overhead = wire_overhead(args.interface)
    ring, mpi, seen, problems = [], "not run", [], unreachable(nodes)
    if not problems:
        low, high = (limit * args.rate_gbps / overhead for limit in (RETRY_BELOW, 1 + TOLERANCE))
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
            unseen = f"{args.share}: cannot read the file that the head wrote; see journalctl -u shared-storage"
            problems += [f"{node}: {unseen}" for node in nodes if node not in seen and not problem]
        if problem:
            problems.append(problem)
        else:
            mpi = f"{found['ranks']} ranks, sum {found['sum']}, {found['wrong']} wrong"
            if found["sum"] != len(nodes) * (len(nodes) - 1) // 2 or found["wrong"]:
                problems.append(f"MPI: {mpi}")
            neighbours = zip(nodes, nodes[1:] + nodes[:1], found["gbps"], strict=True) if len(nodes) > 1 else ()
            for a, b, gbps in neighbours:
                ring.append({"node": a, "to": b, "gbps": gbps, "wire_gbps": round(gbps * overhead, 4)})
                if abs(gbps * overhead / args.rate_gbps - 1) > TOLERANCE:
                    wire = f"{gbps * overhead:.2f} Gbit/s on the wire"
                    problems.append(f"{a} to {b}: {wire}, expected {args.rate_gbps:g} within {TOLERANCE:.0%}")
    result = {"ok": not problems, "fabric": args.fabric, "rate_gbps": args.rate_gbps, "ring": ring, "mpi": mpi}
    result["share"] = {"path": args.share, "read_on": seen} if args.share else None
    print(json.dumps({**result, "problems": problems}))
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
