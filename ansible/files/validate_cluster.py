"""Validates the cluster from its head: every node is reachable over the fabric, each ring neighbour gets its rate, MPI
sums correctly, and every node reads what the head writes to the share.

On a shaped fabric all nodes share one machine. If that machine is too busy, a link seems slow or fast although it is
not. This is only a warning, if three things show that the link itself has its rate: judge().

Prints JSON. Exits with 1 and one line that names the node if a check fails.
"""

import argparse
import json
import math
import re
import secrets
import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

TOLERANCE = 0.10
# A native link may be faster than cluster.yml says (bursts of EC2), but not slower than this share of the rate. One
# connection does not fill a fast link.
FLOOR = 0.85
STREAM_GBPS = 8
# Duration of one measurement. A pair below this fraction of the rate is measured again, at most TRIES times by each of
# STARTS runs of mpi-hello.
MEASURE_MS = 200
RETRY_BELOW = 0.92
TRIES = 5
STARTS = 4
# What runs now, for the controller: Ansible prints nothing before the end.
CURRENT = Path("/tmp/horovod-validation")  # noqa: S108 (on the head)
MPI_TIMEOUT = 120
# The deploy does not wait for the mount; on a new node it may take this long.
SHARE_TIMEOUT = 60
# Before it measures, each rank prints what it reads from the share.
READ_SHARE = """
end=$(($(date +%s) + TIMEOUT))
until found=$(cat "$file" 2>/dev/null) || [ "$(date +%s)" -ge $end ]; do sleep 0.3; done
echo "share $OMPI_COMM_WORLD_RANK $found"
""".replace("TIMEOUT", str(SHARE_TIMEOUT))
# The share of the rate that even a busy machine sends without a break.
LOW_SHARE = 0.1
# How long a link must keep its rate: longer than the burst that a token bucket usually lets through.
PEAK_MS = 40
PROBE_SECONDS = 2
PROBE_TRIES = 3
# Set by roles/fabric, with the interface's name at the end: it limits what a node receives.
INGRESS = "ifb"
# Lines of MPI's output that name an error, and those of a backtrace and of its epilogue.
ERROR = re.compile(
    r"error|fail|fatal|denied|refused|unreachable|unable|can.?not|can't|not (found|permitted|supported|available)"
    r"|no route|no .*transport|invalid|illegal|timed? ?out",
    re.IGNORECASE,
)
NOISE = re.compile(
    r"(\[[^]]*\] )?(\[ ?\d+\] |\*\*\* |=+ backtrace|=+$|-+$|\d+ +(0x|/))|Warning: Permanently added|mpirun noticed"
    r"|Primary job +terminated|exit code\. Per user-direction"
)
READ_SHAPERS = r"""
PATH=/usr/sbin:$PATH
found=$(tc qdisc show | sed -n 's/^qdisc tbf [^ ]* dev \([^ ]*\) root.* rate \([^ ]*\) .*/\1=\2/p' | tr '\n' ' ')
card=$(sudo -n /usr/local/sbin/fabric-rate show | sed 's/.*"interface": "\([^"]*\)".*/\1/')
echo "shapers $OMPI_COMM_WORLD_RANK $card $found"
"""
# One rank sends to the other through the kernel's buffers, which need no CPU time of ours to empty. The other reads the
# time at which the kernel received each part, so that a late reader does not look like a slow link. Prints
# the mean payload rate in Gbit/s and the highest that lasted for the given time.
PROBE = """
import os, socket, struct, sys, time
SO_TIMESTAMPNS = 35
sender_rank, receiver, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
seconds, window = float(sys.argv[4]), float(sys.argv[5])
if os.environ["OMPI_COMM_WORLD_RANK"] == sender_rank:
    give_up = time.monotonic() + 30
    while True:
        try:
            link = socket.create_connection((receiver, port), timeout=5)
            break
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)
    block, end = bytes(1 << 20), time.monotonic() + seconds
    link.settimeout(30)
    while time.monotonic() < end:
        link.sendall(block)
    link.close()
else:
    server = socket.create_server(("", port))
    server.settimeout(30)
    link = server.accept()[0]
    link.settimeout(30)
    link.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    buffer, samples, total = bytearray(1 << 16), [], 0
    while True:
        count, extra, _, _ = link.recvmsg_into([buffer], 64)
        if not count:
            break
        total += count
        for _, kind, data in extra:
            if kind == SO_TIMESTAMPNS:
                whole, part = struct.unpack("qq", data[:16])
                samples.append((whole + part * 1e-9, total))
    # Token buckets on the way start full.
    samples = [sample for sample in samples if sample[0] > samples[0][0] + 0.2]
    best, later = 0.0, 0
    for begin, before in samples:
        while later < len(samples) and samples[later][0] < begin + window:
            later += 1
        if later == len(samples):
            break
        moment, after = samples[later]
        best = max(best, 8e-9 * (after - before) / (moment - begin))
    (begin, before), (moment, after) = samples[0], samples[-1]
    print("probe", 8e-9 * (after - before) / (moment - begin), best)
"""
PROBE_PORT = 30499
# Rank $1 sends to $2, which is the other rank.
STREAMS = """
if [ "$OMPI_COMM_WORLD_RANK" != "$1" ]; then
  exec timeout 60 iperf3 --server --one-off --port "$3" > /dev/null
fi
for try in 1 2 3 4 5 6 7 8 9 10; do
  found=$(iperf3 --client "$2" --port "$3" --parallel "$4" --time "$5" --json) && break
  sleep 0.5
done
echo "$found"
"""


def wire_overhead(interface):
    """Bytes on the wire per byte of payload: Ethernet, IP and TCP headers."""
    mtu = int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    return (mtu + 14) / (mtu - 52)


def unreachable(nodes, port):
    found = []
    for node in nodes:
        try:
            socket.create_connection((node, port), timeout=5).close()
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


def show(text):
    # It only informs: a file of another account in its place stops nothing.
    with suppress(OSError):
        CURRENT.write_text(text)


def mpirun(nodes, *words):
    argv = ["mpirun", "-H", ",".join(f"{node}:1" for node in nodes), *words]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=MPI_TIMEOUT)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, -1, "", f"timed out after {MPI_TIMEOUT} s")


def measure(nodes, low, high, file):
    """Run mpi-hello until every pair has its rate. Returns result, what each node read from the share, problem."""
    found, seen, problem = run_hello(nodes, low, high, file)
    for start in range(1, STARTS):
        if problem or all(low <= gbps <= high for gbps in found["gbps"]):
            break
        show(f"MPI from each node to the next, start {start + 1} of {STARTS}: {min(found['gbps']):.2f} Gbit/s so far")
        again, _, problem = run_hello(nodes, low, high, None)
        if not problem:
            found["wrong"] += again["wrong"]
            found["gbps"] = [max(pair) for pair in zip(found["gbps"], again["gbps"], strict=True)]
    return found, seen, problem


def run_hello(nodes, low, high, file):
    # Reset the rate first: a killed sweep leaves its own rate, and a connection keeps the packet size it started with.
    read = f"file={shlex.quote(str(file))}{READ_SHARE}" if file else ""
    command = f'sudo -n /usr/local/sbin/fabric-rate reset; {read}exec mpi-hello "$@"'
    words = [str(MEASURE_MS), f"{low:.6f}", f"{high:.6f}", str(TRIES)]
    try:
        done = mpirun(nodes, "sh", "-c", command, "mpi-hello", *words)
        lines = done.stdout.splitlines()
        seen = {nodes[int(line.split()[1])]: line.split()[2:] for line in lines if line.startswith("share ")}
        return json.loads("".join(line for line in lines if line.startswith("{"))), seen, ""
    except json.JSONDecodeError:
        return None, {}, f"MPI: mpi-hello failed: {cause(done.stderr)}"


def cause(text):
    """What MPI or UCX says about an error, in one line. A crash prints a backtrace after it, which says nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not NOISE.match(line.strip())]
    said = [line for line in lines if ERROR.search(line)]
    return " ".join(" ".join(said or lines or ["no output"]).split())[:400]


def gbps_of(text):
    """1Gbit or 100Mbit, as tc prints a rate."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)bit", text)
    return float(match[1]) * {"": 1e-9, "K": 1e-6, "M": 1e-3, "G": 1, "T": 1e3}[match[2]] if match else None


def read_shapers(nodes):
    """Configured rates in Gbit/s, sending and receiving, of every node; None where nothing is configured."""
    found = dict.fromkeys(nodes, (None, None))
    for line in mpirun(nodes, "sh", "-c", READ_SHAPERS).stdout.splitlines():
        word, _, rest = line.partition(" ")
        rank, card, *shapers = rest.split() if word == "shapers" else ["", ""]
        if rank.isdigit():
            rates = dict(shaper.split("=") for shaper in shapers)
            found[nodes[int(rank)]] = tuple(
                gbps_of(rates.get(device, "")) for device in (card, f"{INGRESS}{card}"[:15])
            )
    return found


def probe(nodes, row, rate):
    """Mean and highest payload rate of a link. rate: what fabric-rate does on both nodes before."""
    # In the order of all nodes: mpirun gives rank 0 to the node it runs on.
    pair = [node for node in nodes if node in (row["node"], row["to"])]
    command = f'sudo -n /usr/local/sbin/fabric-rate {rate}; exec "$@"'
    words = [sys.executable, "-c", PROBE, str(pair.index(row["node"])), row["to"]]
    numbers = map(str, (PROBE_PORT, PROBE_SECONDS, PEAK_MS / 1000))
    found = re.findall(
        r"^probe (\S+) (\S+)$", mpirun(pair, "sh", "-c", command, "probe", *words, *numbers).stdout, re.M
    )
    return tuple(map(float, found[0])) if found else (0.0, 0.0)


def at_low_rate(nodes, row, rate, overhead):
    """Rate on the wire while both nodes are limited to a rate that a busy machine reaches."""
    found = 0.0
    try:
        for number in range(PROBE_TRIES):
            show(f"{row['node']} to {row['to']} is off: limited to {rate:g} Gbit/s, try {number + 1} of {PROBE_TRIES}")
            found = overhead * probe(nodes, row, f"set {rate * 1000:g}")[0]
            if abs(found / rate - 1) <= TOLERANCE:
                break
    finally:
        mpirun(nodes, "sudo", "-n", "/usr/local/sbin/fabric-rate", "reset")
    return found


def at_full_rate(nodes, row, rate, overhead):
    """The highest rate on the wire that a link kept for PEAK_MS."""
    best = 0.0
    for number in range(PROBE_TRIES):
        show(f"{row['node']} to {row['to']} is off: at the full rate, try {number + 1} of {PROBE_TRIES}")
        best = max(best, overhead * probe(nodes, row, "reset")[1])
        if best >= (1 - TOLERANCE / 2) * rate:
            break
    return best


def with_streams(nodes, row, rate, overhead):
    """Rate on the wire with as many connections as a rate needs, and their number."""
    streams = max(2, math.ceil(rate / STREAM_GBPS))
    pair = [node for node in nodes if node in (row["node"], row["to"])]
    words = [str(pair.index(row["node"])), row["to"], str(PROBE_PORT), str(streams), str(PROBE_SECONDS)]
    best = 0.0
    for number in range(PROBE_TRIES):
        show(f"{row['node']} to {row['to']}: {streams} connections, try {number + 1} of {PROBE_TRIES}")
        text = mpirun(pair, "sh", "-c", STREAMS, "streams", *words).stdout
        with suppress(ValueError, KeyError):
            received = json.loads(text[text.index("{") :])["end"]["sum_received"]["bits_per_second"]
            best = max(best, overhead * received / 1e9)
        if best >= FLOOR * rate:
            break
    return best, streams


def judge_native(row, rate, measure_many):
    """The problem of a native link, "" if there is none. measure_many: measures with several connections."""
    if row["wire_gbps"] >= FLOOR * rate:
        return ""
    wire, streams = measure_many()
    if wire > row["wire_gbps"]:
        row |= {"wire_gbps": round(wire, 4), "streams": streams}
    if wire >= FLOOR * rate:
        return ""
    found = f"{row['wire_gbps']:.2f} Gbit/s on the wire with {streams} connections"
    return f"{row['node']} to {row['to']}: {found}, expected at least {FLOOR * rate:g} ({FLOOR:.0%} of {rate:g})"


def wrong_rate(row, rate):
    wire = f"{row['wire_gbps']:.2f} Gbit/s on the wire"
    return f"{row['node']} to {row['to']}: {wire}, expected {rate:g} within {TOLERANCE:.0%}"


def judge(row, rate, shapers, measure_low, measure_peak):
    """Whether the machine or the fabric gave a link another rate: (problem, warning), of which one is empty.

    shapers: configured rates by node; measure_low: returns the rate on the wire at LOW_SHARE of the rate; measure_peak:
    returns the highest for PEAK_MS. A link throttled elsewhere never reaches its rate, busy machine or not. A reader
    that waits for a core finds full buffers and seems fast; the probes use the kernel's times of arrival.
    """
    wrong = wrong_rate(row, rate)
    for node in (row["node"], row["to"]):
        for direction, found in zip(("sending", "receiving"), shapers[node], strict=True):
            if found is None or abs(found / rate - 1) > 0.01:
                text = "not limited" if found is None else f"limited to {found:g} Gbit/s"
                return f"{wrong}; {direction} on {node} is {text}; run `make deploy`", ""
    low, low_gbps = LOW_SHARE * rate, measure_low()
    if abs(low_gbps / low - 1) > TOLERANCE:
        return f"{wrong}; limited to {low:g} Gbit/s it is {low_gbps:.3f}, so the machine's load is not the reason", ""
    peak_gbps = measure_peak()
    if abs(peak_gbps / rate - 1) > TOLERANCE:
        return f"{wrong}; at most {peak_gbps:.2f} for {PEAK_MS} ms, so the machine's load is not the reason", ""
    proof = f"the link reaches {peak_gbps:.2f} for {PEAK_MS} ms and {low_gbps:.3f} when limited to {low:g}"
    return "", f"{wrong}: this machine is busy; both nodes are limited to {rate:g}, {proof}"


def check_rates(ring, nodes, rate, shaped, overhead):
    """Problems and warnings of the ring's rates; marks rows whose rate does not describe the link."""
    problems, warnings, shapers = [], [], None
    for row in ring:
        if abs(row["wire_gbps"] / rate - 1) <= TOLERANCE:
            continue
        problem, warning = wrong_rate(row, rate), ""
        if not shaped:
            problem = judge_native(row, rate, partial(with_streams, nodes, row, rate, overhead))
        else:
            shapers = shapers or read_shapers(nodes)
            low = partial(at_low_rate, nodes, row, LOW_SHARE * rate, overhead)
            problem, warning = judge(row, rate, shapers, low, partial(at_full_rate, nodes, row, rate, overhead))
        if warning:
            row["warning"] = warning
        problems += [problem] if problem else []
        warnings += [warning] if warning else []
    return problems, warnings


def main():
    parser = argparse.ArgumentParser()
    for name in ("--nodes", "--fabric", "--interface"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rate-gbps", type=float, required=True)
    parser.add_argument("--ssh-port", type=int, default=22)
    parser.add_argument("--shaped", action="store_true")
    parser.add_argument("--share", default="")
    args = parser.parse_args()
    nodes = args.nodes.split(",")
    overhead = wire_overhead(args.interface)
    show(f"reaching {len(nodes)} nodes, MPI from each to the next, reading the share")
    ring, mpi, seen, warnings, problems = [], "not run", [], [], unreachable(nodes, args.ssh_port)
    if not problems:
        # A native link has no upper limit.
        limits = (RETRY_BELOW, 1 + TOLERANCE) if args.shaped else (FLOOR, math.inf)
        low, high = (limit * args.rate_gbps / overhead for limit in limits)
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
            found = check_rates(ring, nodes, args.rate_gbps, args.shaped, overhead)
            problems, warnings = problems + found[0], found[1]
    result = {"ok": not problems, "fabric": args.fabric, "rate_gbps": args.rate_gbps, "ring": ring, "mpi": mpi}
    result["share"] = {"path": args.share, "read_on": seen} if args.share else None
    print(json.dumps({**result, "problems": problems, "warnings": warnings}))
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
