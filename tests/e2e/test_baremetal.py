"""Existing machines are adopted. Nodes of terraform/local that no role has configured serve as the machine room.

The tests depend on each other and run in order; hosts and environments are removed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.core import config
from cluster.core.contract import parse
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers import registry
from cluster.terraform import Root, read_output

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv/bin"
ROOM, ENV = "metalroom", "metal"
NAMES = ("head", "w1", "w2")
CLUSTER_FILE = ROOT / f"inventories/{ENV}/group_vars/all/cluster.yml"
PINS = ROOT / f"inventories/{ENV}/known_hosts.txt"
# Running Terraform in this process changes os.environ; commands must start without these changes.
CLEAN = dict(os.environ)
ADMIN = "10.85.0.1/32"
STRANGER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ1xT0m0Y4sV2n0Q8nD6l5bq3VQkq0xqk0iJm3yqkq0x"
pytestmark = pytest.mark.timeout(1500)


def run(
    *argv: str | Path, ok: bool = True, answer: str | None = None, timeout: int = 1200
) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in argv]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=timeout, input=answer, env=CLEAN)
    if ok:
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


def cluster(
    *words: str, env: str = ENV, ok: bool = True, answer: str | None = None
) -> subprocess.CompletedProcess[str]:
    return run(BIN / "cluster", "--env", env, *words, ok=ok, answer=answer)


def on(node: str, command: str, ok: bool = True) -> str:
    return run("podman", "exec", f"{ROOM}-{node}", "sh", "-c", command, ok=ok).stdout


def rules() -> dict[str, str]:
    """What a deploy would change first: the firewall's file and its active rules."""
    return {name: on(name, "cat /etc/horovod-cluster/firewall.nft; nft list ruleset") for name in NAMES[:2]}


def change(host: dict[str, Any] | None = None, metal: dict[str, Any] | None = None, **values: Any) -> None:
    """Edit cluster.yml; `host` changes the last host of the cluster."""
    content = yaml.safe_load(CLUSTER_FILE.read_text())
    content["cluster"] |= values
    content["cluster"]["baremetal"] |= metal or {}
    content["cluster"]["baremetal"]["hosts"][content["cluster"]["nodes"] - 1] |= host or {}
    CLUSTER_FILE.write_text(yaml.safe_dump(content))


def boot_machine_room() -> None:
    """A local deploy with Terraform but without Ansible."""
    state = State(ROOM)
    state.prepare()
    loaded = config.load(ROOM)
    provider = registry.provider(state, loaded)
    progress = Progress(ROOM)
    provider.ensure_image(progress)
    Root(state, loaded, provider).apply([], progress)
    # Unlike real machines, these hosts share two cores: waiting ranks must let others run.
    for name in NAMES:
        on(
            name,
            "install -d -o horovod ~horovod/.openmpi; echo mpi_yield_when_idle=1 > ~horovod/.openmpi/mca-params.conf",
        )


def remove() -> None:
    for name in (ENV, ROOM):
        if (ROOT / "inventories" / name).exists():
            cluster("destroy", env=name, ok=False)
            shutil.rmtree(ROOT / "inventories" / name)
    shutil.rmtree(ROOT / "results" / ENV, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def environments():
    remove()
    for name, source in ((ROOM, "local"), (ENV, "baremetal")):
        shutil.copytree(ROOT / "inventories" / source, ROOT / "inventories" / name, symlinks=True)
    path = ROOT / f"inventories/{ROOM}/group_vars/all/cluster.yml"
    room = yaml.safe_load(path.read_text())
    networks = {"management": "10.85.0.0/24", "fabric": "10.85.1.0/24"}
    room["cluster"] |= {"name": ROOM, "nodes": len(NAMES), "networks": networks, "admin_cidrs": [ADMIN]}
    path.write_text(yaml.safe_dump(room))
    try:
        boot_machine_room()
        found = read_output(State(ROOM))
        hosts = [
            {
                "name": name,
                "address": node.management_address,
                "fabric_addresses": {"1g": node.fabric_addresses["1g"]},
                "gpus": 0,
                "gpu_model": "none",
            }
            for name, node in found.ordered()
        ]
        metal = {
            "user": "ops",
            "key": str(State(ROOM).key),
            "networks": {"1g": {"interface": "fabric0", "subnet": networks["fabric"]}},
            "hosts": hosts,
        }
        fabrics = {"1g": {"rate_gbps": 1, "transport": "tcp", "shaped": True}}
        change(
            metal=metal | {"jump_host": None},
            name=ENV,
            nodes=2,
            admin_cidrs=[ADMIN],
            fabrics=fabrics,
            active_fabric="1g",
            # Containers cannot mount NFS.
            storage=room["cluster"]["storage"],
            # The features of the image, so that nothing has to be installed.
            features=room["cluster"].get("features", {}),
        )
        yield
    finally:
        remove()
        for name in os.environ.keys() - CLEAN.keys() - {"PYTEST_CURRENT_TEST"}:
            del os.environ[name]
        os.environ.update(CLEAN)


def test_deploy_stops_without_pinned_host_keys():
    done = cluster("deploy", ok=False)
    assert done.returncode == 2
    assert "no pinned host key for head, w1; run `make adopt ENV=metal`" in done.stderr


def test_keys_are_pinned_only_after_confirmation():
    done = cluster("adopt", ok=False, answer="no\n")
    assert done.returncode == 1
    assert not PINS.exists()
    for name in NAMES:
        real = on(name, "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub").split()[1]
        assert real in done.stdout
    cluster("adopt", answer="yes\n")
    assert len(PINS.read_text().splitlines()) == len(NAMES)
    assert "already pinned" in cluster("adopt").stdout


@pytest.mark.parametrize(
    ("host", "metal", "damage", "undo", "code", "message"),
    [
        (
            {"address": "10.85.0.99", "host_key": STRANGER},
            {},
            "",
            "",
            3,
            "host w2 (10.85.0.99): unreachable",
        ),
        ({}, {"user": "horovod"}, "", "", 2, "user horovod cannot log in"),
        ({"host_key": STRANGER}, {}, "", "", 2, "host w2 (10.85.0.12): its host key is not the pinned one"),
        (
            {},
            {},
            "cp -a --remove-destination $(readlink -f /etc/os-release) /etc/os-release;"
            " sed -i 's/^ID=.*/ID=ubuntu/; s/^VERSION_CODENAME=.*/VERSION_CODENAME=jammy/' /etc/os-release",
            "ln -sf ../usr/lib/os-release /etc/os-release",
            2,
            "host w2 (10.85.0.12): runs ubuntu jammy, but cluster.os_release is bookworm (Debian 12)",
        ),
        (
            {},
            {},
            "mv /etc/sudoers.d/ops /root/ops.sudoers",
            "mv /root/ops.sudoers /etc/sudoers.d/ops",
            2,
            "host w2 (10.85.0.12): user ops cannot use sudo without a password",
        ),
        ({}, {}, "hostname other", "hostname w2", 2, "host w2 (10.85.0.12): its hostname is other"),
        (
            {"fabric_addresses": {"1g": "10.85.1.77"}},
            {},
            "",
            "",
            2,
            "host w2 (10.85.0.12): fabric0 does not have the address 10.85.1.77",
        ),
    ],
    ids=["unreachable", "wrong user", "other key", "other system", "no sudo", "other name", "other address"],
)
def test_host_that_does_not_match_is_named_before_anything_changes(host, metal, damage, undo, code, message):
    before, written = rules(), CLUSTER_FILE.read_text()
    change(host, metal, nodes=3)
    try:
        if damage:
            on("w2", damage)
        done = cluster("deploy", ok=False)
    finally:
        CLUSTER_FILE.write_text(written)
        if undo:
            on("w2", undo)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert rules() == before
    assert not State(ENV).tfstate.exists()


def test_plan_shows_what_a_deploy_would_change_and_changes_nothing():
    before = rules()
    text = cluster("plan").stdout
    assert "/etc/horovod-cluster/firewall.nft" in text
    assert [line for line in text.splitlines() if line.startswith("+") and f"ip saddr {{ {ADMIN} }}" in line]
    assert rules() == before


def test_deploy_on_existing_hosts_is_validated():
    done = cluster("deploy")
    result = json.loads((ROOT / f".state/{ENV}/validation.json").read_text())
    assert result["ok"]
    assert result["mpi"].startswith("2 ranks")
    assert "2 nodes are up and validated" in done.stdout
    assert on("head", "systemctl is-active firewall-rollback.timer", ok=False).strip() == "inactive"


def test_inventory_has_the_same_groups_as_that_of_a_local_cluster():
    made = json.loads(run(ROOT / f"inventories/{ENV}/terraform.py").stdout)
    found = parse(read_output(State(ENV)).model_dump())
    assert made["cluster"]["hosts"] == [name for name, _ in found.ordered()] == ["head", "w1"]
    assert set(made) == set(json.loads(run(ROOT / f"inventories/{ROOM}/terraform.py").stdout))


def test_second_deploy_changes_nothing():
    assert "ansible changed 0 things" in cluster("deploy").stdout


def test_admin_networks_without_this_machine_are_refused_before_anything_changes():
    before = rules()
    change(admin_cidrs=["10.99.0.0/24"])
    try:
        done = cluster("deploy", ok=False)
    finally:
        change(admin_cidrs=[ADMIN])
    assert done.returncode == 2
    assert f"it sees this machine as {ADMIN.partition('/')[0]}, which is not in cluster.admin_cidrs" in done.stderr
    assert rules() == before


def test_rules_that_lock_us_out_are_rolled_back():
    before = rules()
    # Rules that nobody can see through before they are loaded.
    ports = CLUSTER_FILE.with_name("ports.yml")
    ports.write_text("firewall_admin_ports: [9]\n")
    try:
        done = cluster("deploy", ok=False)
    finally:
        ports.unlink()
    assert done.returncode == 3
    assert f"add the address from which the nodes see this machine to cluster.admin_cidrs ({ADMIN})" in done.stderr
    assert rules() == before
    assert cluster("status").returncode == 0
    assert "ansible changed 0 things" in cluster("deploy").stdout


def test_bench_measures_adopted_hosts(tmp_path):
    point = {"nodes": [2], "batches": [32], "fabrics": ["1g"], "engines": ["ddp"], "seconds": 10}
    path = tmp_path / "metal.yml"
    path.write_text(yaml.safe_dump(point))
    run(BIN / "bench", "sweep", "--env", ENV, "--plan", path)
    (trial,) = map(json.loads, (ROOT / f"results/{ENV}/metal/trials.jsonl").read_text().splitlines())
    assert trial["status"] == "ok"
    assert trial["point"]["nodes"] == 2
    assert trial["images_per_second"]["median"] > 0


def test_destroy_does_not_change_the_hosts():
    cluster("destroy")
    assert not State(ENV).dir.exists()
    for name in NAMES:
        assert on(name, "hostname").strip() == name
