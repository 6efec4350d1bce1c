"""One cluster from the first deploy to its removal, with the commands that make runs.

The tests depend on each other and run in order; the cluster is always removed at the end.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import environments
import pytest
import silence
import yaml
from environments import BIN, ROOT, contract, leftovers, podman, run

ENV = "e2e"
OTHER = "e2eb"
pytestmark = pytest.mark.timeout(1500)
cluster = functools.partial(environments.cluster, env=ENV)


@pytest.fixture(scope="module", autouse=True)
def created():
    environments.remove(ENV, OTHER)
    environments.make_env(ENV, 81, 3)
    environments.make_env(OTHER, 82, 1)
    yield
    environments.remove(ENV, OTHER)


def uptimes() -> dict[str, int]:
    return {row["node"]: row["uptime_s"] for row in json.loads(cluster("status", "--json", ok=False).stdout)}


def test_bad_count_changes_nothing():
    done = cluster("deploy", "--nodes", "300", ok=False)
    assert done.returncode == 2
    assert "--nodes: 300 is not possible" in done.stderr
    assert done.stderr.count("\n") == 1
    assert leftovers(ENV) == []


@pytest.mark.parametrize("phase", ["image", "terraform:", "ansible:"])
def test_destroy_after_a_killed_deploy_leaves_nothing(phase):
    process = subprocess.Popen(
        [BIN / "cluster", "--env", ENV, "deploy", "--nodes", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    for line in process.stdout:
        if phase in line:
            break
    else:
        pytest.fail(f"the deploy never printed {phase}")
    time.sleep(0.7)
    process.send_signal(signal.SIGKILL)
    process.wait()
    cluster("destroy")
    cluster("destroy")
    assert leftovers(ENV) == []


def test_deploy_gives_validated_nodes():
    result = json.loads(cluster("deploy", "--json").stdout)
    assert result["ok"]
    assert len(result["ring"]) == 3
    assert result["mpi"].startswith("3 ranks")
    assert result["share"] == {"path": "/shared", "read_on": ["head", "w1", "w2"]}


def test_second_deploy_changes_nothing():
    shown = silence.record([BIN / "cluster", "--env", ENV, "deploy"], terminal=True, cwd=ROOT)
    assert shown.returncode == 0, shown.text
    assert "ansible changed 0 things" in shown.text
    assert silence.problems(shown) == []
    before, _, last = (ROOT / f".state/{ENV}/logs/terraform.log").read_text().rpartition("terraform apply")
    assert before
    assert "0 added, 0 changed, 0 destroyed" in last


def test_secrets_are_private_and_in_no_output():
    """Keys and tokens of a deployment."""
    state = ROOT / ".state" / ENV
    # The second line of a key: the first is only its header.
    secrets = {
        path: path.read_text().splitlines()[1 if "BEGIN" in path.read_text() else 0]
        for path in state.iterdir()
        if path.is_file() and ("PRIVATE KEY" in path.read_text() or "token" in path.name)
    }
    assert {path.name for path in secrets} >= {"id_ed25519", "mesh_ed25519"}
    output = cluster("deploy").stdout
    written = [*(state / "logs").iterdir(), *state.glob("*.json"), *state.glob("*.tfstate*"), *state.glob("*.log")]
    for path, secret in secrets.items():
        assert path.stat().st_mode & 0o077 == 0, path.name
        assert secret not in output, path.name
        for other in written:
            assert secret not in other.read_text(), f"{path.name} is in {other.name}"


def test_auditing_tools_find_only_accepted_issues():
    """ssh-audit from outside and lynis on the node. A finding that no longer occurs must be removed from audit.yml."""
    known = yaml.safe_load((Path(__file__).parent / "audit.yml").read_text())
    head = contract(ENV)["_meta"]["hostvars"]["head"]["ansible_host"]
    report = json.loads(run(BIN / "ssh-audit", "--json", "--skip-rate-test", head, ok=False).stdout)
    seen = {"fail": set(), "warn": set()}
    for kind in ("kex", "key", "enc", "mac"):
        for algorithm in report[kind]:
            for level in seen:
                if algorithm.get("notes", {}).get(level):
                    seen[level].add(algorithm["algorithm"])
    assert seen == {"fail": set(), "warn": set(known["ssh-audit"])}
    node = f"{ENV}-head"
    install = "apt-get update -qq && apt-get install -qq -y --no-install-recommends lynis"
    run("podman", "exec", node, "sh", "-c", install)
    run("podman", "exec", node, "sh", "-c", "lynis audit system --quick --quiet --no-colors >/dev/null 2>&1; true")
    lines = run("podman", "exec", node, "cat", "/var/log/lynis-report.dat").stdout.splitlines()
    run("podman", "exec", node, "sh", "-c", "apt-get purge -qq -y lynis && rm -f /var/log/lynis*")
    warnings = {line.partition("=")[2].split("|")[0] for line in lines if line.startswith("warning[]=")}
    assert warnings == set(known["lynis"])
    print(*(line for line in lines if line.startswith("hardening_index=")))


def reachable(address: str, port: int, within: str | None = None, source: str = "") -> bool:
    """Whether a TCP connection opens, from here or from inside a container.

    Fabric addresses can be reached only from inside: this machine has no route to a fabric.
    """
    if within:
        code = f"import socket; socket.create_connection(('{address}', {port}), 2, ('{source}', 0))"
        return run("podman", "exec", within, "python3", "-c", code, ok=False).returncode == 0
    try:
        socket.create_connection((address, port), 2).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("node", ["head", "w1"])
def test_services_have_no_ordering_cycle(node):
    """systemd breaks such a cycle by dropping one of its services, not always the same one."""
    # verify also fails for other reasons, such as missing manual pages.
    command = "systemd-analyze --version > /dev/null && (systemd-analyze verify default.target 2>&1 || true)"
    output = run("podman", "exec", f"{ENV}-{node}", "sh", "-c", command).stdout
    assert "ordering cycle" not in output, output


def test_only_allowed_ports_answer():
    listener = "import socket; s = socket.create_server(('', 20123)); s.settimeout(60); s.accept(); s.accept()"
    subprocess.run(["podman", "exec", "-d", f"{ENV}-w1", "python3", "-c", listener], check=True)
    listens = "timeout 20 sh -c 'until ss -Hltn sport = 20123 | grep -q .; do sleep 0.1; done'"
    run("podman", "exec", f"{ENV}-w1", "sh", "-c", listens)
    w1 = contract(ENV)["_meta"]["hostvars"]["w1"]
    assert reachable(w1["ansible_host"], 22)
    assert not reachable(w1["ansible_host"], 20123)
    assert not reachable(w1["ansible_host"], 20123, within=f"{ENV}-head")
    fabric = w1["node_fabric_addresses"]["1g"]
    assert reachable(fabric, 20123, within=f"{ENV}-head")
    # A machine on the fabric that is not a node of the cluster.
    podman("exec", f"{ENV}-head", "ip", "address", "add", "10.81.1.200/24", "dev", "fabric0")
    assert not reachable(fabric, 20123, within=f"{ENV}-head", source="10.81.1.200")
    podman("exec", f"{ENV}-head", "ip", "address", "del", "10.81.1.200/24", "dev", "fabric0")


def test_two_environments_do_not_affect_each_other():
    before = uptimes()
    cluster("deploy", env=OTHER)
    other = contract(OTHER)["_meta"]["hostvars"]["head"]
    mine = contract(ENV)["_meta"]["hostvars"]["head"]
    assert not reachable(mine["ansible_host"], 22, within=f"{OTHER}-head")
    assert reachable(other["ansible_host"], 22)
    cluster("destroy", env=OTHER)
    assert leftovers(OTHER) == []
    after = uptimes()
    assert all(after[node] >= before[node] for node in before)


def test_missing_node_is_reported_and_repaired():
    podman("stop", "-t", "0", f"{ENV}-w1")
    podman("rm", "-f", "-t", "0", f"{ENV}-w2")
    done = cluster("status", "--json", ok=False)
    states = {row["node"]: row["state"] for row in json.loads(done.stdout)}
    assert done.returncode == 1
    assert states["w2"] == "missing"
    assert states["w1"] != "running"
    report = json.loads(cluster("doctor", "--json", ok=False).stdout)
    assert not report["ok"]
    assert {"node w1", "node w2"} <= {failure["name"] for failure in report["failures"]}
    head = uptimes()["head"]
    cluster("deploy")
    assert cluster("status", ok=False).returncode == 0
    assert uptimes()["head"] >= head


def test_scale_changes_only_the_difference():
    def may_mount_the_share() -> bool:
        return "10.81.1.13" in podman("exec", f"{ENV}-head", "gluster", "volume", "get", "share", "auth.allow")

    before = uptimes()
    cluster("scale", "--nodes", "4")
    assert set(uptimes()) == {"head", "w1", "w2", "w3"}
    new = contract(ENV)["_meta"]["hostvars"]["w3"]
    addresses = [new["ansible_host"], *new["node_fabric_addresses"].values()]
    trace = ["grep", "-rIlF", *(f"-e{address}" for address in set(addresses)), "/etc", "/home", "/var/lib/glusterd"]
    assert podman("exec", f"{ENV}-head", *trace)
    # A single node, as after a repair: the addresses of the others come from the inventory.
    settings = {"PATH": f"{BIN}:{os.environ['PATH']}", "ANSIBLE_CONFIG": str(ROOT / "ansible/ansible.cfg")}
    limited = subprocess.run(
        [BIN / "ansible-playbook", "-i", ROOT / "inventories" / ENV, ROOT / "ansible/site.yml", "--limit", "w3"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert limited.returncode == 0, limited.stdout
    assert re.search(r"^w3 .* changed=0 .* failed=0", limited.stdout, re.MULTILINE)
    assert may_mount_the_share()
    cluster("scale", "--nodes", "3")
    assert not may_mount_the_share()
    after = uptimes()
    assert set(after) == {"head", "w1", "w2"}
    assert all(after[node] >= before[node] for node in after)
    for node in after:
        assert podman("exec", f"{ENV}-{node}", *trace) == "", "a removed node left traces"
    assert not any(address in (ROOT / f".state/{ENV}/known_hosts").read_text() for address in addresses)


def test_destroy_leaves_nothing():
    cluster("destroy")
    cluster("destroy")
    assert leftovers(ENV) == []
    assert " 10.81." not in run("ip", "-4", "address").stdout
