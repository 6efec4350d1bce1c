"""The first process of a GPULab job: finds the other jobs over the project's storage, then becomes Horovod's rank.

JOB_NUMBER, JOB_COUNT, JOB_SLOTS and JOB_FOLDER say who we are and where to meet. Arguments: the command of one rank.
One job with several GPUs needs no meeting: horovodrun starts its ranks.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

PROBE_PORT = 29400
PROBE_SECONDS = 10
LEAVE_SECONDS = 20


def own_address() -> str:
    """The address with which this job reaches others: of the interface that has the default route, or the first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect(("192.0.2.1", 9))  # nothing is sent: it only picks a route
            return str(sender.getsockname()[0])
        except OSError:
            words = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
            return words[0]


def interface_of(address: str) -> str:
    for link in json.loads(subprocess.run(["ip", "-j", "-4", "address"], capture_output=True, check=True).stdout):
        if any(found["local"] == address for found in link["addr_info"]):
            return str(link["ifname"])
    raise SystemExit(f"Error: no interface has the address {address}")


def put(folder: Path, name: str, value: dict[str, Any]) -> None:
    """Whole or not at all: others poll for it over a network file system."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{name}"
    part.write_text(json.dumps(value))
    part.replace(folder / name)


def get(folder: Path, name: str, deadline: float) -> dict[str, Any]:
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"Error: no {name} in {folder}: that job does not run, or the storage is not shared")
        time.sleep(0.5)
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def probe(number: int, count: int, folder: Path, deadline: float) -> None:
    """Can the jobs reach each other? Each listens, tells its address and calls every other; job 0 prints the answer."""
    with socket.create_server(("", PROBE_PORT)) as server:
        server.settimeout(0.5)
        put(folder, f"{number}.json", {"address": own_address()})
        others = {i: get(folder, f"{i}.json", deadline)["address"] for i in range(count) if i != number}
        reached = {}
        for i, address in others.items():
            until = time.monotonic() + PROBE_SECONDS
            reached[i] = False
            while not reached[i] and time.monotonic() < until:
                try:
                    socket.create_connection((address, PROBE_PORT), timeout=3).close()
                    reached[i] = True
                except OSError:
                    time.sleep(0.5)
        put(folder, f"{number}.done", {"unreachable": [others[i] for i, ok in reached.items() if not ok]})
        answers = [get(folder, f"{i}.done", deadline + PROBE_SECONDS * count) for i in range(count)]
    if number == 0:
        missing = sorted({address for answer in answers for address in answer["unreachable"]})
        answer = {"jobs": count, "unreachable": missing, "interface": interface_of(own_address())}
        print("@probe " + json.dumps(answer), flush=True)


def rank_environment(number: int, count: int, folder: Path, deadline: float) -> dict[str, str]:
    """What Horovod's Gloo controller needs where no launcher sets it; job 0 serves the rendezvous."""
    address = own_address()
    put(folder, f"{number}.json", {"address": address})
    peers = [get(folder, f"{i}.json", deadline)["address"] for i in range(count)]
    if number == 0:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        server = RendezvousServer()
        port = server.start()
        server.init(get_host_assignments(parse_hosts(",".join(f"{peer}:1" for peer in peers)), count))
        put(folder, "rendezvous", {"address": address, "port": port})
    meeting = get(folder, "rendezvous", deadline)
    interface = interface_of(address)
    return {
        "HOROVOD_RANK": str(number),
        "HOROVOD_SIZE": str(count),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(number),
        "HOROVOD_CROSS_SIZE": str(count),
        "HOROVOD_HOSTNAME": peers[number],
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": meeting["address"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(meeting["port"]),
        "HOROVOD_GLOO_IFACE": interface,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }


def write_spec() -> None:
    """The spec of the launch, which the controller put into variables: there is no other way into a job."""
    if "SPEC_FILE" in os.environ:
        parts = [os.environ.pop(f"SPEC_{number}") for number in range(int(os.environ["SPEC_PARTS"]))]
        Path(os.environ["SPEC_FILE"]).write_bytes(zlib.decompress(base64.b64decode("".join(parts))))


def leave(number: int, count: int, folder: Path) -> None:
    """Job 0 is the last to go and clears the folder away; a job that crashed leaves it for another time."""
    put(folder, f"{number}.left", {})
    if number == 0:
        deadline = time.monotonic() + LEAVE_SECONDS
        while not all((folder / f"{i}.left").exists() for i in range(count)) and time.monotonic() < deadline:
            time.sleep(0.2)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    argv = sys.argv[1:]
    number, count, slots = (int(os.environ[name]) for name in ("JOB_NUMBER", "JOB_COUNT", "JOB_SLOTS"))
    folder = Path(os.environ["JOB_FOLDER"])
    write_spec()
    deadline = time.monotonic() + float(os.environ["JOB_START_SECONDS"])
    if count == 1:
        launcher = Path(sys.executable).parent / "horovodrun"
        command = [str(launcher), "--gloo", "-np", str(slots), "-H", f"localhost:{slots}", *argv]
        return subprocess.run(command, check=False).returncode
    code = 0
    if argv == ["probe"]:
        probe(number, count, folder, deadline)
    else:
        environment = {**os.environ, **rank_environment(number, count, folder, deadline)}
        code = subprocess.run(argv, env=environment, check=False).returncode
    leave(number, count, folder)
    return code
