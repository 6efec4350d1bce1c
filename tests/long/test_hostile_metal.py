"""Machines of somebody else become a cluster and are given back as they were; their admins never notice a lock-out.

The tests depend on each other and run in order. metal_room.py makes the machines: a login user of their own, SSH on
port 2222 behind a jump host, IPv6 for admins, cards with other names on each, Docker-like rules, our user id taken.
The cluster is deployed from a copy of this checkout in a temporary folder, and from there only.

HOSTILE_IMAGE=base takes bare Debian, on which everything must be installed. HOSTILE_LOCK is for how many seconds
another package manager holds both locks of apt. HOSTILE_KEEP=1 keeps the machines and the copy, to look at them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

from metal_room import JUMP, LAN6, NETWORKS, NODES, PORT, Room  # noqa: E402

from tests.checkouts import alone  # noqa: E402

BIN = ROOT / ".venv/bin"
ENV = "hostile"
# A file manager in the background may hold apt's locks for minutes; the deploy waits.
LOCK_SECONDS = int(os.environ.get("HOSTILE_LOCK", "120"))
# Prints the images of the machines and of the jump host, and builds those that are missing. It may get one.
IMAGES = """
import sys
from cluster import image
from cluster.core import config
from cluster.core.progress import Progress
from cluster.core.state import State
state, progress = State("local"), Progress("local", stderr=True)
state.prepare()
base = image.ensure_base(state, "bookworm", progress)
given = {"": "", "base": base}.get(sys.argv[1], sys.argv[1])
print(given or image.ensure(state, config.load("local"), progress), base)
"""
# Written by dpkg, ldconfig and systemd for the packages that stay.
GENERATED = (
    "/etc/ld.so.cache",
    "/etc/alternatives/",
    "/etc/rc",
    "/etc/ssl/",
    "/etc/mailcap",
    "/etc/python3",
    "/etc/perl",
)
pytestmark = pytest.mark.timeout(3600)

# What must be the same before and after. Counters of rules change with every packet.
LOOKS = {
    "rules": "nft list ruleset",
    "accounts": "getent passwd; getent group; cat /etc/shadow",
    "enabled units": "systemctl list-unit-files --state=enabled --no-legend --plain | sort",
    "failed or new units": "systemctl list-units --type=service --state=active --no-legend --plain"
    " | awk '{print $1}' | grep -v -e @ -e ^run- -e apt -e ^systemd- | sort",
    "sshd": "sshd -T",
    "kernel settings": "sysctl net.ipv4.tcp_congestion_control net.ipv4.tcp_rmem net.ipv4.tcp_wmem",
    "queues": "tc qdisc show | grep -v ifb | sort",
    "listening": "ss -Hltn | awk '{print $4}' | sort",
    "links": "ip -o link show | awk '{print $2}' | sort",
    "folders": "ls -d /* /usr/local/*bin/* /opt/* /home/* /var/*/horovod* 2>/dev/null",
}
MANIFEST = r"""find /etc \( -type f -exec sha256sum {} + \) -o \( -type l -printf '%l  %p\n' \)"""


class Controller:
    """A copy of this checkout. All that `cluster` and `bench` write is in it, and the machines are known only to it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).exists():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)
        (self.root / ".venv").symlink_to(ROOT / ".venv")
        shutil.copytree(self.root / "inventories/baremetal", self.root / "inventories" / ENV, symlinks=True)
        self.cluster_file = self.root / f"inventories/{ENV}/group_vars/all/cluster.yml"
        # The user's own SSH configuration, which knows the jump host.
        self.ssh_config = folder / "ssh_config"
        self.ssh_config.touch()
        ssh = folder / "bin/ssh"
        ssh.parent.mkdir()
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.ssh_config} "$@"\n')
        ssh.chmod(0o755)
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "PATH": f"{ssh.parent}:{os.environ['PATH']}",
            **dict.fromkeys(("ANSIBLE_SFTP_EXTRA_ARGS", "ANSIBLE_SCP_EXTRA_ARGS"), f"-F {self.ssh_config}"),
        }

    def run(self, *argv: str | Path, ok: bool = True, answer: str = "") -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in argv]
        done = subprocess.run(
            words, cwd=self.root, capture_output=True, text=True, timeout=3000, env=self.environ, input=answer
        )
        if ok:
            assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    def cluster(self, *words: str, ok: bool = True, answer: str = "") -> subprocess.CompletedProcess[str]:
        return self.run(BIN / "cluster", "--env", ENV, *words, ok=ok, answer=answer)

    def images(self) -> tuple[str, str]:
        """Images of the machines and of the jump host."""
        given = os.environ.get("HOSTILE_IMAGE", "")
        machine, jump = self.run(BIN / "python", "-c", IMAGES, given).stdout.split()[-2:]
        shutil.rmtree(self.root / ".state/local")
        return machine, jump

    def change(self, **values: object) -> None:
        content = yaml.safe_load(self.cluster_file.read_text())
        content["cluster"] |= values
        self.cluster_file.write_text(yaml.safe_dump(content))

    def log(self, name: str) -> str:
        return (self.root / f".state/{ENV}/logs/{name}.log").read_text()


def looks(room: Room) -> dict[str, dict[str, str]]:
    return {name: {what: room.on(name, command) for what, command in LOOKS.items()} for name in NODES}


def manifest(room: Room, name: str) -> dict[str, str]:
    """File in /etc -> checksum or target."""
    lines = room.on(name, MANIFEST).splitlines()
    return {path: content for content, _, path in (line.partition("  ") for line in lines)}


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    folder = tmp_path_factory.mktemp("controller")
    try:
        with alone(ENV):
            yield Controller(folder)
    finally:
        if not os.environ.get("HOSTILE_KEEP"):
            shutil.rmtree(folder)


def configure(controller: Controller, room: Room) -> None:
    """cluster.yml for the machines, and the jump host in the user's SSH configuration."""
    jump = f"Host {room.address(JUMP)}\n  IdentityFile {room.key('alice')}\n"
    controller.ssh_config.write_text(f"{jump}  UserKnownHostsFile {room.known_jump_host}\n")
    metal = {
        "user": "alice",
        "key": str(room.key("alice")),
        "jump_host": f"alice@{room.address(JUMP)}",
        "networks": {name: {"subnet": NETWORKS[name]} for name in ("one", "two")},
        "hosts": [
            {
                "name": name,
                "address": room.address6(name),
                "fabric_addresses": {network: room.address(name, network) for network in ("one", "two")},
                "gpus": 0,
                "gpu_model": "none",
            }
            for name in NODES
        ],
    }
    controller.change(
        name=ENV,
        nodes=len(NODES),
        # That of the jump host, whose address podman translates, and no IPv4 network at all.
        admin_cidrs=[f"{LAN6}/64"],
        ports={"ssh": PORT, "jupyter": 8888},
        storage={"backend": "glusterfs", "path": "/shared"},
        features={},
        fabrics={name: {"rate_gbps": rate, "shaped": True} for name, rate in (("one", 1), ("two", 0.5))},
        active_fabric="one",
        baremetal=metal,
    )


@pytest.fixture(scope="module")
def room(controller: Controller, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    room = Room(tmp_path_factory.mktemp("room"), *controller.images())
    try:
        room.start()
        configure(controller, room)
        yield room
    finally:
        if not os.environ.get("HOSTILE_KEEP"):
            room.remove()
            controller.cluster("destroy", "--yes", ok=False)


@pytest.fixture(scope="module")
def before(room: Room) -> dict[str, dict[str, str]]:
    room.watch_logins()
    return looks(room)


@pytest.fixture(scope="module")
def etc(room: Room, before: object) -> dict[str, dict[str, str]]:
    return {name: manifest(room, name) for name in NODES}


def guests_reach(room: Room) -> bool:
    """The containers of the machines reach the machine's own services, and others through it."""
    return all(
        room.guest_reaches(name, "172.31.7.1", 5300) and room.guest_reaches(name, room.address("jump"), 22)
        for name in NODES
    )


def test_host_keys_are_read_through_the_jump_host(
    controller: Controller, room: Room, before: object, etc: object
) -> None:
    controller.cluster("adopt", answer="yes\n")
    pinned = (controller.root / f"inventories/{ENV}/known_hosts.txt").read_text().splitlines()
    assert [line.split()[0] for line in pinned] == [f"[{room.address6(name)}]:{PORT}" for name in NODES]


def test_plan_changes_nothing(
    controller: Controller, room: Room, before: dict[str, dict[str, str]], etc: dict[str, dict[str, str]]
) -> None:
    assert guests_reach(room)
    text = controller.cluster("plan").stdout
    assert f"ip6 saddr {{ {LAN6}/64 }}" in text
    assert "AllowUsers" not in text
    assert looks(room) == before
    assert {name: manifest(room, name) for name in NODES} == etc


def test_service_that_others_use_is_not_taken_over(controller: Controller, room: Room, before: object) -> None:
    room.on("w1", "systemd-run --quiet --unit=nginx sleep infinity")
    controller.change(features={"data": True})
    try:
        done = controller.cluster("plan", ok=False)
    finally:
        controller.change(features={})
        room.on("w1", "systemctl stop nginx")
    assert done.returncode
    assert "nginx.service is in use here, and features.data in cluster.yml would change it" in done.stderr


def test_deploy_waits_for_other_package_managers_and_says_so(
    controller: Controller, room: Room, before: object
) -> None:
    for name in NODES:
        room.hold_apt(name, LOCK_SECONDS)
    text = controller.cluster("deploy").stdout
    assert f"{len(NODES)} nodes are up and validated" in text
    waiting = "FAILED - RETRYING: [w1]: Wait until cloud-init and other package managers are done"
    assert waiting in controller.log("ansible")


def test_training_account_has_the_same_free_id_everywhere(room: Room) -> None:
    assert {room.on(name, "id -u horovod").strip() for name in NODES} == {"1501"}
    assert {room.on(name, "id -u carol").strip() for name in NODES} == {"1500"}


def test_guests_of_the_machines_are_still_served(room: Room) -> None:
    assert guests_reach(room)


def test_peers_reach_each_other_on_both_fabrics_and_nobody_else_does(room: Room) -> None:
    room.on("head", "systemd-run --quiet --collect --unit=any python3 -m http.server 7000")
    room.on("head", "until ss -Hltn sport = 7000 | grep -q .; do sleep 0.1; done")
    reach = "python3 -c 'import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=2)' "
    try:
        for network in ("one", "two"):
            room.on("w1", reach + room.address("head", network))
        for name, network in (("w1", "lan"), ("jump", "lan")):
            assert "TimeoutError" in room.on(name, f"{reach}{room.address('head', network)} 2>&1", check=False)
    finally:
        room.on("head", "systemctl stop any")


def test_files_reach_the_share_through_the_jump_host(controller: Controller, room: Room, tmp_path: Path) -> None:
    (tmp_path / "words").write_text("from here\n")
    controller.cluster("put", str(tmp_path / "words"), "datasets")
    assert room.on("w1", "cat /shared/datasets/words") == "from here\n"
    controller.cluster("get", "datasets/words", str(tmp_path / "again"))
    assert (tmp_path / "again").read_text() == "from here\n"


def shaped(room: Room, name: str) -> dict[str, str]:
    """Interface -> rate of its token bucket."""
    lines = [line.split() for line in room.on(name, "tc qdisc show").splitlines() if line.startswith("qdisc tbf")]
    return {words[words.index("dev") + 1]: words[words.index("rate") + 1] for words in lines}


RATES = {
    "head": {"enp1s0": "1Gbit", "ifbenp1s0": "1Gbit", "ens5f0": "500Mbit", "ifbens5f0": "500Mbit"},
    "w1": {"eth7": "1Gbit", "ifbeth7": "1Gbit", "enp9s0": "500Mbit", "ifbenp9s0": "500Mbit"},
}


def test_sweep_measures_both_fabrics_in_one_run(controller: Controller, room: Room, tmp_path: Path) -> None:
    plan = tmp_path / "both.yml"
    points = {"nodes": [2], "batches": [32], "fabrics": ["one", "two"], "engines": ["horovod-mpi", "horovod-gloo"]}
    plan.write_text(yaml.safe_dump({**points, "seconds": 5}))
    controller.run(BIN / "bench", "sweep", "--env", ENV, "--plan", plan)
    file = controller.root / f"results/{ENV}/both/trials.jsonl"
    trials = [json.loads(line) for line in file.read_text().splitlines()]
    assert [trial["status"] for trial in trials] == ["ok"] * 4, [trial["error"] for trial in trials]
    assert {trial["point"]["fabric"] for trial in trials} == {"one", "two"}
    assert {name: shaped(room, name) for name in NODES} == RATES


def test_another_fabric_can_become_active_and_the_first_again(controller: Controller, room: Room) -> None:
    """Both cards stay alive and keep their rates, and the share stays mounted."""
    for active in ("two", "one"):
        controller.change(active_fabric=active)
        result = controller.cluster("deploy")
        assert "validated" in result.stdout
        assert {name: shaped(room, name) for name in NODES} == RATES
        for network in ("one", "two"):
            room.on("w1", f"ping -c 2 -W 2 {room.address('head', network)}")
        room.on("head", f"runuser -u horovod -- sh -c 'echo {active} > /shared/results/active'")
        assert room.on("w1", "timeout 20 cat /shared/results/active").strip() == active


def test_release_gives_the_machines_back(
    controller: Controller, room: Room, before: dict[str, dict[str, str]], etc: dict[str, dict[str, str]]
) -> None:
    text = controller.cluster("release-hosts", "--yes").stdout
    after = looks(room)
    stays = [line.partition(":")[2] for line in text.splitlines() if "packages that stay" in line]
    for name in NODES:
        for what in LOOKS:
            if what != "accounts":
                assert after[name][what] == before[name][what], f"{name}: {what}\n{text}"
        # Services of packages that stay have accounts of their own.
        lines, known = after[name]["accounts"].splitlines(), before[name]["accounts"].splitlines()
        assert set(known) <= set(lines)
        new = sorted({line.partition(":")[0] for line in set(lines) - set(known)})
        assert stays or not new
        for account in new:
            number = room.on(name, f"id -u {account} || getent group {account} | cut -d: -f3")
            assert int(number) < 1000, f"{name}: {account} stays\n{text}"
        now = manifest(room, name)
        differs = {path for path in now.keys() | etc[name].keys() if now.get(path) != etc[name].get(path)}
        owned = room.on(name, f"dpkg -L {' '.join(stays)}").splitlines() if stays else []
        strange = sorted(path for path in differs - set(owned) if not (stays and path.startswith(GENERATED)))
        assert strange == [], f"{name}: {strange}"
    assert guests_reach(room)


def test_released_machines_can_be_released_again(controller: Controller, room: Room) -> None:
    assert controller.cluster("release-hosts", "--yes").stdout.count("nothing to undo") == len(NODES)


def test_other_admins_could_log_in_at_every_moment(room: Room) -> None:
    for who, answers in room.logins().items():
        refused = [line for line in answers if line != "ok" and "Permanently added" not in line]
        assert len(answers) > 30, who
        assert refused == [], f"{who}: {refused}"
