"""Machines of somebody else become a cluster and are given back as they were; their admins never notice a lock-out.

The tests depend on each other and run in order. metal_room.py makes the machines: a login user of their own, SSH on
port 2222 behind a jump host, IPv6 for admins, cards with other names on each, Docker-like rules, our user id taken.
HOSTILE_IMAGE=base takes bare Debian, on which everything must be installed; HOSTILE_LOCK is for how many seconds
another package manager holds both locks of apt.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))

from metal_room import LAN6, NETWORKS, NODES, PORT, Room

from cluster import image
from cluster.core import config
from cluster.core.progress import Progress
from cluster.core.state import State

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv/bin"
ENV = "hostile"
CLUSTER_FILE = ROOT / f"inventories/{ENV}/group_vars/all/cluster.yml"
# A file manager in the background may hold apt's locks for minutes; the deploy waits.
LOCK_SECONDS = int(os.environ.get("HOSTILE_LOCK", "120"))
CLEAN = dict(os.environ)
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
    "queues": "tc qdisc show | grep -v ifb | sort",
    "links": "ip -o link show | awk '{print $2}' | sort",
    "local": "ls -d /usr/local/*bin/* /opt/* /home/* /var/lib/horovod* 2>/dev/null",
}
MANIFEST = r"""find /etc \( -type f -exec sha256sum {} + \) -o \( -type l -printf '%l  %p\n' \)"""


def run(*argv: str | Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in argv]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=3000, env=CLEAN, stdin=subprocess.DEVNULL
    )
    if ok:
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


def cluster(*words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
    return run(BIN / "cluster", "--env", ENV, *words, ok=ok)


def looks(room: Room) -> dict[str, dict[str, str]]:
    return {name: {what: room.on(name, command) for what, command in LOOKS.items()} for name in NODES}


def manifest(room: Room, name: str) -> dict[str, str]:
    """File in /etc -> checksum or target."""
    lines = room.on(name, MANIFEST).splitlines()
    return {path: content for content, _, path in (line.partition("  ") for line in lines)}


def images(state: State) -> tuple[str, str]:
    """Images of the machines and of the jump host."""
    progress = Progress(ENV)
    base = image.ensure_base(state, "bookworm", progress)
    given = os.environ.get("HOSTILE_IMAGE", "")
    if given:
        return base if given == "base" else given, base
    return image.ensure(state, config.load("local"), progress), base


def change(**values: object) -> None:
    content = yaml.safe_load(CLUSTER_FILE.read_text())
    content["cluster"] |= values
    CLUSTER_FILE.write_text(yaml.safe_dump(content))


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory):
    shutil.rmtree(ROOT / "inventories" / ENV, ignore_errors=True)
    shutil.rmtree(ROOT / "results" / ENV, ignore_errors=True)
    shutil.copytree(ROOT / "inventories/baremetal", ROOT / "inventories" / ENV, symlinks=True)
    state = State(ENV)
    state.prepare()
    os.environ.update(state.environment())
    room = Room(tmp_path_factory.mktemp("room"), *images(state))
    try:
        room.start()
        metal = {
            "user": "alice",
            "key": str(room.key("alice")),
            "jump_host": f"alice@{room.address('jump')}",
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
        change(
            name=ENV,
            nodes=len(NODES),
            # The jump host, and no IPv4 network at all.
            admin_cidrs=[f"{room.address6('jump')}/128"],
            ports={"ssh": PORT, "jupyter": 8888},
            storage={"backend": "glusterfs", "path": "/shared"},
            features={},
            fabrics={name: {"rate_gbps": rate, "shaped": True} for name, rate in (("one", 1), ("two", 0.5))},
            active_fabric="one",
            baremetal=metal,
        )
        yield room
    finally:
        if not os.environ.get("HOSTILE_KEEP"):
            room.remove()
            run(BIN / "cluster", "--env", ENV, "destroy", "--yes", ok=False)
            shutil.rmtree(ROOT / "inventories" / ENV, ignore_errors=True)
            shutil.rmtree(ROOT / "results" / ENV, ignore_errors=True)
        for name in os.environ.keys() - CLEAN.keys() - {"PYTEST_CURRENT_TEST"}:
            del os.environ[name]
        os.environ.update(CLEAN)


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


def test_host_keys_are_read_through_the_jump_host(room: Room, before: object, etc: object) -> None:
    done = subprocess.run(
        [BIN / "cluster", "--env", ENV, "adopt"], cwd=ROOT, capture_output=True, text=True, env=CLEAN, input="yes\n"
    )
    assert done.returncode == 0, done.stderr
    pinned = (ROOT / f"inventories/{ENV}/known_hosts.txt").read_text().splitlines()
    assert [line.split()[0] for line in pinned] == [f"[{room.address6(name)}]:{PORT}" for name in NODES]


def test_plan_changes_nothing(room: Room, before: dict[str, dict[str, str]], etc: dict[str, dict[str, str]]) -> None:
    assert guests_reach(room)
    text = cluster("plan").stdout
    assert f"ip6 saddr {{ {LAN6}5/128 }}" in text
    assert "AllowUsers" not in text
    assert looks(room) == before
    assert {name: manifest(room, name) for name in NODES} == etc


def test_deploy_waits_for_other_package_managers_and_says_so(room: Room, before: object) -> None:
    for name in NODES:
        room.hold_apt(name, LOCK_SECONDS)
    text = cluster("deploy").stdout
    assert f"{len(NODES)} nodes are up and validated" in text
    log = (ROOT / f".state/{ENV}/logs/ansible.log").read_text()
    assert "FAILED - RETRYING: [w1]: Wait until cloud-init and other package managers are done" in log


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


def shaped(room: Room, name: str) -> dict[str, str]:
    """Interface -> rate of its token bucket."""
    lines = [line.split() for line in room.on(name, "tc qdisc show").splitlines() if line.startswith("qdisc tbf")]
    return {words[words.index("dev") + 1]: words[words.index("rate") + 1] for words in lines}


RATES = {
    "head": {"enp1s0": "1Gbit", "ifbenp1s0": "1Gbit", "ens5f0": "500Mbit", "ifbens5f0": "500Mbit"},
    "w1": {"eth7": "1Gbit", "ifbeth7": "1Gbit", "enp9s0": "500Mbit", "ifbenp9s0": "500Mbit"},
}


def test_sweep_measures_both_fabrics_in_one_run(room: Room, tmp_path: Path) -> None:
    plan = tmp_path / "both.yml"
    points = {"nodes": [2], "batches": [32], "fabrics": ["one", "two"], "engines": ["horovod-mpi", "horovod-gloo"]}
    plan.write_text(yaml.safe_dump({**points, "seconds": 5}))
    run(BIN / "bench", "sweep", "--env", ENV, "--plan", plan)
    trials = [json.loads(line) for line in (ROOT / f"results/{ENV}/both/trials.jsonl").read_text().splitlines()]
    assert [trial["status"] for trial in trials] == ["ok"] * 4, [trial["error"] for trial in trials]
    assert {trial["point"]["fabric"] for trial in trials} == {"one", "two"}
    assert {name: shaped(room, name) for name in NODES} == RATES


def test_another_fabric_can_become_active_and_the_first_again(room: Room) -> None:
    """Both cards stay alive and keep their rates, and the share stays mounted."""
    for active in ("two", "one"):
        change(active_fabric=active)
        result = cluster("deploy")
        assert "validated" in result.stdout
        assert {name: shaped(room, name) for name in NODES} == RATES
        for network in ("one", "two"):
            room.on("w1", f"ping -c 2 -W 2 {room.address('head', network)}")
        room.on("head", f"runuser -u horovod -- sh -c 'echo {active} > /shared/results/active'")
        assert room.on("w1", "timeout 20 cat /shared/results/active").strip() == active


def test_release_gives_the_machines_back(
    room: Room, before: dict[str, dict[str, str]], etc: dict[str, dict[str, str]]
) -> None:
    text = cluster("release-hosts", "--yes").stdout
    after = looks(room)
    stays = [line.partition(":")[2] for line in text.splitlines() if "packages that stay" in line]
    for name in NODES:
        for what in LOOKS:
            # Services of packages that stay have accounts of their own.
            if not (stays and what == "accounts"):
                assert after[name][what] == before[name][what], f"{name}: {what}\n{text}"
        now = manifest(room, name)
        differs = {path for path in now.keys() | etc[name].keys() if now.get(path) != etc[name].get(path)}
        owned = room.on(name, f"dpkg -L {' '.join(stays)}").splitlines() if stays else []
        strange = sorted(path for path in differs - set(owned) if not (stays and path.startswith(GENERATED)))
        assert strange == [], f"{name}: {strange}"
    assert guests_reach(room)


def test_released_machines_can_be_released_again(room: Room) -> None:
    assert cluster("release-hosts", "--yes").stdout.count("nothing to undo") == len(NODES)


def test_other_admins_could_log_in_at_every_moment(room: Room) -> None:
    for who, answers in room.logins().items():
        refused = [line for line in answers if line != "ok" and "Permanently added" not in line]
        assert len(answers) > 30, who
        assert refused == [], f"{who}: {refused}"
