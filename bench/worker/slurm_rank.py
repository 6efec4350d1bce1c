"""A rank that srun starts: give it the variables that Horovod's Gloo controller and torch expect.

    slurm_rank COMMAND      rank 0 also serves Horovod's rendezvous, on a port that follows from the job and its step

No rank logs in to another node, and all of them belong to the job: they end with it.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

FIRST_PORT, PORTS = 20000, 10000


def port(environment: Mapping[str, str]) -> int:
    """Jobs on the same node, and steps of a job, do not meet."""
    number = 7 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
    return FIRST_PORT + number % PORTS


def names(environment: Mapping[str, str], hosts: list[str]) -> dict[str, str]:
    """The variables of a rank, for the same number of ranks on every node."""
    rank, size = int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"])
    local, node = int(environment["SLURM_LOCALID"]), int(environment["SLURM_NODEID"])
    each = size // len(hosts)
    # What an interface has is found by the rank itself (fabric.py).
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local),
        "HOROVOD_LOCAL_SIZE": str(each),
        "HOROVOD_CROSS_RANK": str(node),
        "HOROVOD_CROSS_SIZE": str(len(hosts)),
        "HOROVOD_HOSTNAME": hosts[node],
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts[0],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port(environment)),
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": str(port(environment) + PORTS),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(each),
    }


def serve(hosts: list[str], size: int, number: int) -> None:
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = RendezvousHTTPServer(("", number), RendezvousHandler, 0)
    server.init(get_host_assignments(parse_hosts(",".join(f"{host}:{size // len(hosts)}" for host in hosts)), size))
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> int:
    words = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    hosts = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    given = names(os.environ, hosts)
    if given["HOROVOD_RANK"] == "0":
        serve(hosts, int(given["HOROVOD_SIZE"]), port(os.environ))
    child = subprocess.Popen(sys.argv[1:], env={**os.environ, **given})
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    code = child.wait()
    return 128 - code if code < 0 else code
