"""Create and remove one podman container or network of a local cluster.

Terraform runs this module with an action as argument and the resource's input as JSON in INPUT. Standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster.core import errors, lock, root
from cluster.core.errors import InfraError, UserError
from cluster.providers import ssh_server
from cluster.providers.local import machine
from cluster.providers.local.machine import CLUSTER, FINGERPRINT, OWNER, SEED, SEEDS, Network, podman

BOOT_TIMEOUT = 90
# In a node's seed: the node has answered, so that it may hold data.
CREATED = "created"
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


def update_known_hosts(path: Path, address: str, port: int, key: str | None) -> None:
    """Replace the line of this address. The lock is needed because nodes are created in parallel."""
    host = address if port == 22 else f"[{address}]:{port}"
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = path.read_text().splitlines() if path.exists() else []
        lines = [line for line in lines if line.split(" ", 1)[0] != host]
        if key:
            lines.append(f"{host} {key}")
        path.write_text("".join(f"{line}\n" for line in lines))


def nft(rules: str, check: bool = True) -> None:
    done = subprocess.run([*root.sudo("nft"), "nft", "-f", "-"], input=rules, capture_output=True, text=True)
    if check and done.returncode:
        raise InfraError(f"nft failed: {done.stderr.strip()}")


def nft_table(cluster: str) -> str:
    return f"inet horovod_cluster_{cluster.replace('-', '_')}"


def isolate(cluster: str, subnet: str) -> None:
    """Block connections from other networks of this machine. podman gives them this machine's address as source, which
    the nodes trust, and podman's own isolation has gaps while networks are created and removed."""
    name = nft_table(cluster)
    chain = "type filter hook forward priority -10; policy accept;"
    rule = f"ip saddr != {subnet} ip daddr {subnet} ct state new drop"
    nft(f"table {name}\ndelete table {name}\ntable {name} {{\nchain forward {{\n{chain}\n{rule}\n}}\n}}\n")


def owner(spec: dict[str, Any]) -> str:
    """The state folder; "" for a network that is in the state of an earlier version."""
    return machine.owner_of(spec["state_dir"]) if "state_dir" in spec else ""


def create_network(spec: dict[str, Any]) -> None:
    """A network of ours that is there already is kept, with its nodes."""
    found = machine.network(spec["name"], spec["cluster"])
    if found and found.owner not in ("", owner(spec)):
        raise InfraError(f"network {found.name} belongs to {found.owner}; write another cluster.name")
    if found and [str(subnet) for subnet in found.subnets] != [spec["subnet"]]:
        podman("network", "rm", spec["name"])
        found = None
    if not found:
        # podman assigns addresses from the last quarter of the subnet; the nodes' own addresses are below.
        last_quarter = list(ipaddress.ip_network(spec["subnet"]).subnets(prefixlen_diff=2))[3]
        podman(
            *("network", "create", "--disable-dns", "--subnet", spec["subnet"], "--ip-range", str(last_quarter)),
            *("--label", f"{CLUSTER}={spec['cluster']}", "--label", f"{OWNER}={owner(spec)}"),
            *(["--internal"] if spec["internal"] else ["--opt", "isolate=true"]),
            spec["name"],
        )
    if not spec["internal"]:
        isolate(spec["cluster"], spec["subnet"])


def destroy_network(spec: dict[str, Any]) -> None:
    found = machine.network(spec["name"], spec["cluster"])
    if found and found.owner not in ("", owner(spec)):
        return
    # Never -f, which also removes the containers in it.
    if found:
        podman("network", "rm", spec["name"])
    if not spec["internal"]:
        nft(f"delete table {nft_table(spec['cluster'])}", check=False)


def fingerprint(spec: dict[str, Any]) -> str:
    """Of what makes Terraform replace a node, as triggers_replace in terraform/local/main.tf."""
    values = [spec["cluster"], sorted(spec["addresses"].items()), bool(spec.get("fuse"))]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]


def make_seed(folder: Path, authorized: Path, name: str) -> str:
    """Write the node's host key and authorized keys into a folder that is mounted in it; return the public host key."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = folder / "ssh_host_ed25519_key"
    for path in (key, folder / CREATED):
        path.unlink(missing_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", key], check=True)
    shutil.copyfile(authorized, folder / "authorized_keys")
    return public_key(folder)


def public_key(folder: Path) -> str:
    return " ".join((folder / "ssh_host_ed25519_key.pub").read_text().split()[:2])


def create_node(spec: dict[str, Any]) -> None:
    """A node of ours that is there already, and is what we want, is kept with its data: Terraform may have lost it."""
    cluster, name, state = spec["cluster"], spec["name"], Path(spec["state_dir"])
    seed, found = state / SEEDS / name, machine.container(f"{cluster}-{name}")
    if found and found.owner != owner(spec):
        raise InfraError(f"container {found.name} belongs to {found.owner}; write another cluster.name")
    if found and found.fingerprint == fingerprint(spec) and (seed / CREATED).exists():
        pin(spec, public_key(seed))
        start_node(spec)
        return
    if found:
        podman("rm", "-f", "-i", "-t", "0", found.name)
    public = make_seed(seed, state / "id_ed25519.pub", name)
    networks = []
    boot = BOOT_SCRIPT
    if spec["ssh_port"] != 22:
        boot += f"echo Port {spec['ssh_port']} > /etc/ssh/sshd_config.d/00-port.conf\n"
    for network, address in spec["addresses"].items():
        # The same MAC address after every restart, as on a real card: with a new one, peers lose the node for 8 s.
        mac = f"02:76:{ipaddress.ip_address(address).packed.hex(':')}"
        networks += [f"--network={cluster}-{network}:mac={mac},interface_name={INTERFACES[network]}"]
        boot += f"set_address {INTERFACES[network]} {address}\n"
    podman(
        *("create", "--name", f"{cluster}-{name}", "--hostname", name),
        *("--label", f"{CLUSTER}={cluster}", "--label", f"{OWNER}={owner(spec)}"),
        *("--label", f"{FINGERPRINT}={cluster}-{name} {fingerprint(spec)}"),
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
    pin(spec, public)
    start_node(spec)
    (seed / CREATED).touch()


def pin(spec: dict[str, Any], key: str | None) -> None:
    known_hosts = Path(spec["state_dir"]) / "known_hosts"
    if key or known_hosts.exists():
        update_known_hosts(known_hosts, spec["addresses"]["management"], spec["ssh_port"], key)


def start_node(spec: dict[str, Any]) -> None:
    name, address, port = f"{spec['cluster']}-{spec['name']}", spec["addresses"]["management"], spec["ssh_port"]
    podman(spec.get("verb", "start"), name)
    if not ssh_server.wait_for(address, port, BOOT_TIMEOUT):
        raise InfraError(f"node {name}: no SSH on {address}:{port} after {BOOT_TIMEOUT} s; see `podman logs {name}`")


def destroy_node(spec: dict[str, Any]) -> None:
    found = machine.container(f"{spec['cluster']}-{spec['name']}")
    if found and found.owner == owner(spec):
        podman("rm", "-f", "-i", "-t", "0", found.name)
    shutil.rmtree(Path(spec["state_dir"]) / SEEDS / spec["name"], ignore_errors=True)
    pin(spec, None)


def remove_leftovers(spec: dict[str, Any]) -> None:
    """Remove what the state folder owns, of one cluster or of all: a failed create is not in Terraform's state."""
    here, cluster = machine.look(), spec.get("cluster")
    containers = [
        one for one in here.containers if one.owner == owner(spec) and one.cluster == (cluster or one.cluster)
    ]
    for container in containers:
        podman("rm", "-f", "-i", "-t", "0", container.name)
    # A network of an earlier version has no owner once its nodes are gone.
    mine = {cluster, *(one.cluster for one in containers)}
    networks = [one for one in here.networks if one.cluster and owned(one, owner(spec), mine, cluster)]
    for network in networks:
        podman("network", "rm", network.name)
    others = {one.cluster for one in here.networks} - {one.cluster for one in networks}
    for name in {*mine, *(one.cluster for one in networks)} - others - {None}:
        nft(f"delete table {nft_table(str(name))}", check=False)


def remove_dead_build(spec: dict[str, Any]) -> None:
    """Remove what a killed build of another environment left in the subnet that all builders use, one at a time."""
    here, subnet = machine.look(), ipaddress.ip_network(spec["subnet"])
    for network in here.networks:
        if not network.cluster.endswith("-build") or subnet not in network.subnets:
            continue
        nodes = [one for one in here.containers if one.cluster == network.cluster]
        for folder in {network.owner, *(one.owner for one in nodes)} - {"", owner(spec)}:
            # A build that uses another cache, and so another lock.
            if user := lock.holder(Path(folder).with_name(f"{Path(folder).name}.lock")):
                raise InfraError(f"subnet {subnet}: {user} builds an image in it, for {folder}; wait until it ends")
        for node in nodes:
            podman("rm", "-f", "-i", "-t", "0", node.name)
        podman("network", "rm", network.name)
        nft(f"delete table {nft_table(network.cluster)}", check=False)


def owned(network: Network, folder: str, clusters: set[Any], cluster: str | None) -> bool:
    if network.owner:
        return network.owner == folder and cluster in (None, network.cluster)
    return network.cluster in clusters


ACTIONS = {
    "create-network": create_network,
    "destroy-network": destroy_network,
    "create-node": create_node,
    "destroy-node": destroy_node,
    "start": start_node,
    "remove-leftovers": remove_leftovers,
    "remove-dead-build": remove_dead_build,
}

if __name__ == "__main__":
    given = json.loads(os.environ["INPUT"])
    try:
        ACTIONS[sys.argv[1]](given)
    except (InfraError, UserError) as error:
        # Terraform itself would report no more than "local-exec provisioner error".
        if "state_dir" in given:
            errors.pass_on(Path(given["state_dir"]), error)
        sys.exit(str(error))
