"""The first process of a GPULab job: find the other jobs through the project's storage, then start a Horovod rank.

The environment gives JOB_NUMBER, JOB_COUNT, JOB_SLOTS and JOB_FOLDER (for the rendezvous). Arguments: the command of
one rank. A single job needs no rendezvous: horovodrun starts its ranks.
"""

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
    """The address of the interface with the default route, or the first address of this job."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect(("192.0.2.1", 9))  # sends nothing, only selects a route
            return str(sender.getsockname()[0])
        except OSError:
            return subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()[0]


def interface_of(address: str) -> str:
    for link in json.loads(subprocess.run(["ip", "-j", "-4", "address"], capture_output=True, check=True).stdout):
        if any(entry["local"] == address for entry in link["addr_info"]):
            return str(link["ifname"])
    raise SystemExit(f"Error: no interface has the address {address}")


def publish(folder: Path, name: str, value: dict[str, Any]) -> None:
    """Write atomically: other jobs poll for the file over a network file system."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{name}"
    part.write_text(json.dumps(value))
    part.replace(folder / name)


def wait_for(folder: Path, name: str, deadline: float) -> dict[str, Any]:
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"Error: {folder / name}: missing; the job does not run or the storage is not shared")
        time.sleep(0.5)
    value: dict[str, Any] = json.loads((folder / name).read_text())
    return value


def probe(number: int, count: int, folder: Path, deadline: float) -> None:
    """Test connections between jobs: each job listens and connects to all others. Job 0 prints the result."""
    with socket.create_server(("", PROBE_PORT)) as server:
        server.settimeout(0.5)
        publish(folder, f"{number}.json", {"address": own_address()})
        others = {i: wait_for(folder, f"{i}.json", deadline)["address"] for i in range(count) if i != number}
        reached = {}
        for i, address in others.items():
            give_up = time.monotonic() + PROBE_SECONDS
            reached[i] = False
            while not reached[i] and time.monotonic() < give_up:
                try:
                    socket.create_connection((address, PROBE_PORT), timeout=3).close()
                    reached[i] = True
                except OSError:
                    time.sleep(0.5)
        publish(folder, f"{number}.done", {"unreachable": [others[i] for i, ok in reached.items() if not ok]})
        results = [wait_for(folder, f"{i}.done", deadline + PROBE_SECONDS * count) for i in range(count)]
    if number == 0:
        unreachable = sorted({address for result in results for address in result["unreachable"]})
        summary = {"jobs": count, "unreachable": unreachable, "interface": interface_of(own_address())}
        print("@probe " + json.dumps(summary), flush=True)


def rank_environment(number: int, count: int, folder: Path, deadline: float) -> dict[str, str]:
    """The variables that a launcher would set for Horovod's Gloo controller. Job 0 serves the rendezvous."""
    address = own_address()
    publish(folder, f"{number}.json", {"address": address})
    peers = [wait_for(folder, f"{i}.json", deadline)["address"] for i in range(count)]
    if number == 0:
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        server = RendezvousServer()
        port = server.start()
        server.init(get_host_assignments(parse_hosts(",".join(f"{peer}:1" for peer in peers)), count))
        publish(folder, "rendezvous", {"address": address, "port": port})
    rendezvous = wait_for(folder, "rendezvous", deadline)
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
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous["address"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rendezvous["port"]),
        "HOROVOD_GLOO_IFACE": interface,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }


def write_spec() -> None:
    """Write the spec file from environment variables, the only way to pass a file to a job."""
    if "SPEC_FILE" in os.environ:
        parts = [os.environ.pop(f"SPEC_{number}") for number in range(int(os.environ["SPEC_PARTS"]))]
        Path(os.environ["SPEC_FILE"]).write_bytes(zlib.decompress(base64.b64decode("".join(parts))))


def leave(number: int, count: int, folder: Path) -> None:
    """Job 0 waits for the others to finish, then removes the folder."""
    publish(folder, f"{number}.left", {})
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
    if argv == ["probe"]:
        probe(number, count, folder, deadline)
        code = 0
    else:
        environment = {**os.environ, **rank_environment(number, count, folder, deadline)}
        code = subprocess.run(argv, env=environment, check=False).returncode
    leave(number, count, folder)
    return code
