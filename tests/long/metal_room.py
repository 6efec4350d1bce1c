"""Machines that are not ours: containers with their own accounts, SSH port, card names and packet filters.

Each has a management card with IPv4 and IPv6 and two fabric cards. A fourth container is the jump host, the only
machine from which the others will accept logins. Everything has the prefix ROOM, and `Room.remove` removes it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cluster.core.state import containers_conf

ROOM = "hostile"
PORT = 2222
NETWORKS = {"lan": "10.95.0.0/24", "one": "10.95.1.0/24", "two": "10.95.2.0/24"}
LAN6 = "fd00:95::"
JUMP = "jump"
# Card names that differ on every machine: lan, one, two.
CARDS = {"head": ("lan0", "enp1s0", "ens5f0"), "w1": ("eno1", "eth7", "enp9s0"), JUMP: ("eth0",)}
NODES = ("head", "w1")
# What a node image has of our own. The packages and the virtual environments stay, as if somebody had installed them.
STRIP = r"""
cd /etc/systemd/system
for unit in cluster-hosts cluster-firewall fabric-rate shared-storage jupyterlab; do
  rm -f $unit.service *.wants/$unit.service
done
rm -rf *.service.d /etc/horovod-cluster /etc/hosts.cluster /etc/sudoers.d/fabric-rate /etc/jupyterlab
rm -f /etc/sysctl.d/60-horovod-cluster.conf /etc/security/limits.d/horovod-cluster.conf /etc/localtime
rm -f /etc/profile.d/horovod-cluster.sh /etc/ssh/sshd_config.d/00-horovod-cluster.conf /usr/local/sbin/*
rm -f /usr/local/bin/python /usr/local/bin/torchrun /usr/local/bin/horovodrun /etc/nftables.conf
getent passwd horovod > /dev/null && userdel --remove horovod 2> /dev/null
"""
# The machine's own users: alice has sudo and is ours to use; bob and root are other admins; carol has our id.
PEOPLE = r"""
userdel --remove ops 2> /dev/null; rm -f /etc/sudoers.d/ops
for name in alice bob; do
  useradd --create-home --shell /bin/bash $name
  install -d -m 700 -o $name -g $name /home/$name/.ssh
  echo "$name ALL=(ALL) NOPASSWD: ALL" > /etc/sudoers.d/$name
done
printf '%s\n' "$ALICE" > /home/alice/.ssh/authorized_keys
printf '%s\n' "$BOB" > /home/bob/.ssh/authorized_keys
install -d -m 700 /root/.ssh && printf '%s\n' "$BOB" > /root/.ssh/authorized_keys
chown alice /home/alice/.ssh/authorized_keys; chown bob /home/bob/.ssh/authorized_keys
chmod 600 /home/*/.ssh/authorized_keys
groupadd --gid 1500 carol && useradd --uid 1500 --gid 1500 --create-home carol
printf 'Port %s\nPermitRootLogin prohibit-password\n' "$PORT" > /etc/ssh/sshd_config.d/50-site.conf
ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
# Unlike real machines, these share the cores of one: a rank that waits must let others run.
install -d /etc/skel/.openmpi && echo mpi_yield_when_idle=1 > /etc/skel/.openmpi/mca-params.conf
ls /var/lib/apt/lists/*Packages* > /dev/null 2>&1 || apt-get -qq update
# Its own name twice, as Debian's installer and an admin write it.
printf '127.0.1.1 %s.site.example %s\n192.0.2.7 backup-%s\n' "$NAME" "$NAME" "$NAME" > /root/hosts
"""
# As Docker writes them: a bridge with a guest behind it, and what may be forwarded.
DOCKER = r"""
ip link add docker0 type bridge && ip address add 172.31.7.1/24 dev docker0 && ip link set docker0 up
systemd-run --quiet --unit=docker-guest unshare --net sleep infinity
ours=$(readlink /proc/1/ns/net)
pid=$(systemctl show -P MainPID docker-guest)
while [ "$(readlink /proc/$pid/ns/net)" = "$ours" ]; do sleep 0.1; done
ip link add veth0 type veth peer name eth0 netns $pid && ip link set veth0 master docker0 up
in_guest="nsenter --net=/proc/$pid/ns/net"
$in_guest ip address add 172.31.7.2/24 dev eth0 && $in_guest ip link set eth0 up
$in_guest ip route add default via 172.31.7.1
nft -f - <<RULES
table ip nat {
  chain POSTROUTING { type nat hook postrouting priority srcnat; policy accept;
    ip saddr 172.31.7.0/24 oifname != "docker0" masquerade; }
}
table ip filter {
  chain FORWARD { type filter hook forward priority filter; policy drop;
    oifname "docker0" ct state related,established accept
    iifname "docker0" accept; }
}
RULES
systemd-run --quiet --unit=site-dns python3 -m http.server --bind 172.31.7.1 5300
"""


@dataclass
class Room:
    folder: Path
    image: str
    jump_image: str
    nodes: tuple[str, ...] = NODES

    def podman(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        settings = self.folder / "containers.conf"
        if not settings.exists():
            settings.write_text(containers_conf())
        env = os.environ | {"CONTAINERS_CONF": str(settings)}
        done = subprocess.run(["podman", *words], capture_output=True, text=True, env=env)
        assert not check or done.returncode == 0, f"podman {shlex.join(words)}: {done.stderr}"
        return done

    def key(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", path], check=True)
        return path

    def public(self, name: str) -> str:
        return self.key(name).with_suffix(".pub").read_text().strip()

    @property
    def known_jump_host(self) -> Path:
        return self.folder / "jump_known_hosts"

    def number(self, name: str) -> int:
        return 5 if name == JUMP else 10 + self.nodes.index(name)

    def address(self, name: str, network: str = "lan") -> str:
        return NETWORKS[network].replace("0/24", str(self.number(name)))

    def address6(self, name: str) -> str:
        return f"{LAN6}{self.number(name)}"

    def on(self, name: str, command: str, check: bool = True) -> str:
        return self.podman("exec", f"{ROOM}-{name}", "sh", "-c", command, check=check).stdout

    def start(self) -> None:
        self.remove()
        for network, subnet in NETWORKS.items():
            v6 = ["--ipv6", "--subnet", f"{LAN6}/64"] if network == "lan" else ["--internal"]
            self.podman("network", "create", "--disable-dns", "--subnet", subnet, *v6, f"{ROOM}-{network}")
        for name in (*self.nodes, JUMP):
            self.boot(name)
        for name in self.nodes:
            self.on(name, DOCKER)
        known = self.on(JUMP, "cat /etc/ssh/ssh_host_ed25519_key.pub")
        self.known_jump_host.write_text(f"{self.address(JUMP)} {known}")

    def boot(self, name: str) -> None:
        names = ["lan"] if name == JUMP else list(NETWORKS)
        networks = []
        for network, card in zip(names, CARDS[name], strict=True):
            options = f"ip={self.address(name, network)},interface_name={card}"
            options += f",ip6={self.address6(name)}" if network == "lan" else ""
            networks.append(f"--network={ROOM}-{network}:{options}")
        port = "22" if name == JUMP else str(PORT)
        values = {"ALICE": self.public("alice"), "BOB": self.public("bob"), "PORT": port, "NAME": name}
        self.podman(
            *("create", "--name", f"{ROOM}-{name}", "--hostname", name, "--systemd=always", "--shm-size=1g"),
            *("--cap-add=NET_ADMIN", "--cap-add=SYS_ADMIN", "--device=/dev/fuse", "--sysctl=net.ipv4.ip_forward=1"),
            *("--sysctl=net.ipv4.tcp_congestion_control=reno", *networks),
            *(f"--env={key}={value}" for key, value in values.items()),
            *(self.jump_image if name == JUMP else self.image, "/bin/sh", "-c"),
            f"{STRIP}\n{PEOPLE}\ncat /root/hosts >> /etc/hosts\nexec /sbin/init",
        )
        self.podman("start", f"{ROOM}-{name}")
        self.on(name, f"for i in $(seq 300); do ss -Hltn sport = {port} | grep -q . && exit; sleep 0.2; done; exit 1")

    def remove(self) -> None:
        for name in (*self.nodes, JUMP):
            self.podman("rm", "-f", "-i", "-t", "0", f"{ROOM}-{name}", check=False)
        for network in NETWORKS:
            self.podman("network", "rm", "-f", f"{ROOM}-{network}", check=False)

    def hold_apt(self, name: str, seconds: int) -> None:
        """Both locks, as unattended-upgrades holds them."""
        code = (
            "import fcntl, time; names = '/var/lib/dpkg/lock-frontend', '/var/lib/apt/lists/lock'; "
            "files = [open(name, 'w') for name in names]; "
            f"[fcntl.lockf(file, fcntl.LOCK_EX) for file in files]; time.sleep({seconds})"
        )
        self.on(name, f"systemd-run --quiet --collect --unit=apt-holder python3 -c {shlex.quote(code)}")

    def watch_logins(self) -> None:
        """The other admins log in to every machine every second, from the jump host."""
        self.podman("cp", str(self.key("bob")), f"{ROOM}-{JUMP}:/root/bob")
        self.on(JUMP, "chmod 600 /root/bob; mkdir -p /root/probe")
        for name in self.nodes:
            for user in ("bob", "root"):
                login = (
                    f"ssh -i /root/bob -p {PORT} -o BatchMode=yes -o ConnectTimeout=5 "
                    f"-o StrictHostKeyChecking=accept-new {user}@{self.address6(name)} true"
                )
                loop = f"while :; do {login} && echo ok || date +%T; sleep 1; done >> /root/probe/{user}-{name} 2>&1"
                self.on(JUMP, f"systemd-run --quiet --unit=probe-{user}-{name} sh -c {shlex.quote(loop)}")

    def logins(self) -> dict[str, list[str]]:
        """Who and where -> what every login printed."""
        names = self.on(JUMP, "ls /root/probe").split()
        return {name: self.on(JUMP, f"cat /root/probe/{name}").splitlines() for name in names}

    def guest_reaches(self, name: str, address: str, port: int) -> bool:
        """Whether the container behind docker0 connects to an address, through the machine or to the machine."""
        code = f"import socket; socket.create_connection(('{address}', {port}), timeout=3)"
        enter = "nsenter --net=/proc/$(systemctl show -P MainPID docker-guest)/ns/net"
        return (
            self.podman("exec", f"{ROOM}-{name}", "sh", "-c", f'{enter} python3 -c "{code}"', check=False).returncode
            == 0
        )
