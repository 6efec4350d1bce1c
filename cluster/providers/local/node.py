"""Create and remove one podman container or network of a local cluster.

Terraform runs this module with an action as argument and the resource's input as JSON in INPUT. Standard library only.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster.providers import ssh_server

LABEL = "horovod-cluster"
BOOT_TIMEOUT = 90
SEEDS = "seeds"
SEED = "/var/lib/horovod-cluster-seed"
INTERFACES = {"management": "mgmt0", "fabric": "fabric0"}
# A node runs this before its init. It copies the mounted files, because sshd accepts only files that root owns. It also
# replaces the addresses that podman assigned: after a plain `podman stop`, podman keeps such an address reserved for
# ever, and the node could not start again.
BOOT_SCRIPT = f"""set -e
install -m 600 {SEED}/ssh_host_ed25519_key /etc/ssh/
install -m 644 {SEED}/ssh_host_ed25519_key.pub /etc/ssh/
install -m 644 {SEED}/authorized_keys /home/ops/.ssh/
set_address() {{
  given=$(ip -o -4 address show dev $1) && length=${{given#*/}}
  route=$(ip -4 route show default dev $1)
  ip -4 address flush dev $1
  ip address add $2/${{length%% *}} dev $1
  [ -z "$route" ] || ip route add $route dev $1
}}
"""
# The role fabric sets these on real machines. A container cannot, and would inherit the host's settings, which may be
# bbr. Of the algorithms that suit a training network, a container may select only reno.
TCP = {"net.ipv4.tcp_congestion_control": "reno", "net.ipv4.tcp_slow_start_after_idle": "0"}


def podman(*args: str, check: bool = True) -> str:
    conf = os.environ.get("CONTAINERS_CONF")
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n", *([f"CONTAINERS_CONF={conf}"] if conf else [])]
    done = subprocess.run([*sudo, "podman", *args], capture_output=True, text=True)
    if check and done.returncode:
        sys.exit(f"podman {args[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def update_known_hosts(path: Path, address: str, port: int, key: str | None) -> None:
    """Replace the line of this address. The lock is needed because nodes are created in parallel."""
    host = address if port == 22 else f"[{address}]:{port}"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = path.read_text().splitlines() if path.exists() else []
        lines = [line for line in lines if line.split(" ", 1)[0] != host]
        if key:
            lines.append(f"{host} {key}")
        path.write_text("".join(f"{line}\n" for line in lines))


def nft(rules: str, check: bool = True) -> None:
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    done = subprocess.run([*sudo, "nft", "-f", "-"], input=rules, capture_output=True, text=True)
    if check and done.returncode:
        sys.exit(f"nft failed: {done.stderr.strip()}")


def nft_table(cluster: str) -> str:
    return f"inet horovod_cluster_{cluster.replace('-', '_')}"


def isolate(cluster: str, subnet: str) -> None:
    """Block connections from other networks of this machine. podman gives them this machine's address as source, which
    the nodes trust, and podman's own isolation has gaps while networks are created and removed."""
    name = nft_table(cluster)
    chain = "type filter hook forward priority -10; policy accept;"
    rule = f"ip saddr != {subnet} ip daddr {subnet} ct state new drop"
    nft(f"table {name}\ndelete table {name}\ntable {name} {{\nchain forward {{\n{chain}\n{rule}\n}}\n}}\n")


def create_network(spec: dict[str, Any]) -> None:
    podman("network", "rm", "-f", spec["name"], check=False)
    # podman assigns addresses from the last quarter of the subnet; the nodes' own addresses are below.
    last_quarter = list(ipaddress.ip_network(spec["subnet"]).subnets(prefixlen_diff=2))[3]
    podman(
        *("network", "create", "--disable-dns", "--subnet", spec["subnet"], "--ip-range", str(last_quarter)),
        *("--label", f"{LABEL}={spec['cluster']}"),
        *(["--internal"] if spec["internal"] else ["--opt", "isolate=true"]),
        spec["name"],
    )
    if not spec["internal"]:
        isolate(spec["cluster"], spec["subnet"])


def destroy_network(spec: dict[str, Any]) -> None:
    podman("network", "rm", "-f", spec["name"], check=False)
    if not spec["internal"]:
        nft(f"delete table {nft_table(spec['cluster'])}", check=False)


def make_seed(folder: Path, authorized: Path, name: str) -> str:
    """Write the node's host key and authorized keys into a folder that is mounted in it; return the public host key."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = folder / "ssh_host_ed25519_key"
    key.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", key], check=True)
    shutil.copyfile(authorized, folder / "authorized_keys")
    return " ".join(key.with_suffix(".pub").read_text().split()[:2])


def create_node(spec: dict[str, Any]) -> None:
    cluster, name, state = spec["cluster"], spec["name"], Path(spec["state_dir"])
    seed = state / SEEDS / name
    public = make_seed(seed, state / "id_ed25519.pub", name)
    networks = []
    boot = BOOT_SCRIPT
    for network, address in spec["addresses"].items():
        # The same MAC address after every restart, as on a real card: with a new one, peers lose the node for 8 s.
        mac = f"02:76:{ipaddress.ip_address(address).packed.hex(':')}"
        networks += [f"--network={cluster}-{network}:mac={mac},interface_name={INTERFACES[network]}"]
        boot += f"set_address {INTERFACES[network]} {address}\n"
    podman(
        *("create", "--replace", "--name", f"{cluster}-{name}", "--hostname", name, "--label", f"{LABEL}={cluster}"),
        # NET_ADMIN: firewall and shaping inside the node. SYS_ADMIN: FUSE mounts of a share.
        *("--systemd=always", "--cap-add=NET_ADMIN", "--shm-size=1g"),
        *(["--cap-add=SYS_ADMIN", "--device=/dev/fuse"] if spec.get("fuse") else []),
        *(f"--cap-add={capability}" for capability in spec.get("capabilities", [])),
        "--restart=unless-stopped",
        *(f"--sysctl={key}={value}" for key, value in TCP.items()),
        *networks,
        f"--volume={seed}:{SEED}:ro",
        *(f"--volume={source}:{target}:ro" for source, target in spec.get("mounts", {}).items()),
        *(spec["image"], "/bin/sh", "-c", boot + "exec /sbin/init"),
    )
    update_known_hosts(state / "known_hosts", spec["addresses"]["management"], spec["ssh_port"], public)
    start_node(spec)


def start_node(spec: dict[str, Any]) -> None:
    name, address, port = f"{spec['cluster']}-{spec['name']}", spec["addresses"]["management"], spec["ssh_port"]
    podman("start", name)
    if not ssh_server.wait_for(address, port, BOOT_TIMEOUT):
        sys.exit(f"node {name}: no SSH on {address}:{port} after {BOOT_TIMEOUT} s; see `podman logs {name}`")


def destroy_node(spec: dict[str, Any]) -> None:
    podman("rm", "-f", "-i", "-t", "0", f"{spec['cluster']}-{spec['name']}")
    shutil.rmtree(Path(spec["state_dir"]) / SEEDS / spec["name"], ignore_errors=True)
    known_hosts = Path(spec["state_dir"]) / "known_hosts"
    if known_hosts.exists():
        update_known_hosts(known_hosts, spec["addresses"]["management"], spec["ssh_port"], None)


def print_states(spec: dict[str, Any]) -> None:
    """Print node -> {state, since} for every container of the cluster, whatever Terraform's state says."""
    rows = json.loads(podman("ps", "-a", "--format=json", f"--filter=label={LABEL}={spec['cluster']}") or "[]")
    prefix = f"{spec['cluster']}-"
    found = {row["Names"][0].removeprefix(prefix): {"state": row["State"], "since": row["StartedAt"]} for row in rows}
    print(json.dumps(found))


def remove_leftovers(spec: dict[str, Any]) -> None:
    """Remove everything with the cluster's label: a failed create is not in Terraform's state."""
    labelled = f"--filter=label={LABEL}={spec['cluster']}"
    for identifier in podman("ps", "-aq", labelled).split():
        podman("rm", "-f", "-i", "-t", "0", identifier)
    for network in podman("network", "ls", "-q", labelled).split():
        podman("network", "rm", "-f", network)
    nft(f"delete table {nft_table(spec['cluster'])}", check=False)


ACTIONS = {
    "create-network": create_network,
    "destroy-network": destroy_network,
    "create-node": create_node,
    "destroy-node": destroy_node,
    "states": print_states,
    "start": start_node,
    "remove-leftovers": remove_leftovers,
}

if __name__ == "__main__":
    ACTIONS[sys.argv[1]](json.loads(os.environ["INPUT"]))
