"""What is noted on machines that existed before the cluster, and what a playbook's changes are."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from cluster.core.config import ROOT

ON_NODE = ROOT / "ansible/plugins/on_node"
HOSTS = ROOT / "roles/common/files/cluster-hosts"


def constants(path: Path) -> dict[str, object]:
    """The names that a script defines, without its last line, which runs it."""
    lines = path.read_text().rstrip().splitlines()
    assert lines[-1].startswith("main(")
    found: dict[str, object] = {}
    exec("\n".join(lines[:-1]), found)  # noqa: S102
    return found


def test_every_kernel_setting_of_the_roles_is_restored() -> None:
    (task,) = [
        task
        for task in yaml.safe_load((ROOT / "roles/fabric/tasks/install.yml").read_text())
        if task.get("ansible.builtin.copy", {}).get("dest", "").startswith("/etc/sysctl.d")
    ]
    lines = task["ansible.builtin.copy"]["content"].splitlines()
    names = {line.partition(" = ")[0] for line in lines if not line.startswith("#")}
    assert names == set(constants(ON_NODE / "adopted_host.py")["SYSCTLS"])


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("record", ROOT / "ansible/plugins/callback/record_changes.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    file = tmp_path / "changes.jsonl"
    monkeypatch.setenv("CLUSTER_CHANGES", str(file))

    def recorded(action: str, found: dict[str, object], **task: object) -> list[dict[str, str]]:
        file.write_text("")
        task = {"action": action, "check_mode": False, "delegate_to": None, **task}
        host = SimpleNamespace(get_name=lambda: "w1")
        module.CallbackModule().note(SimpleNamespace(_host=host, _task=SimpleNamespace(**task), _result=found))
        return [json.loads(line) for line in file.read_text().splitlines()]

    return recorded


def test_changed_files_and_units_are_recorded_with_their_host(record) -> None:
    copied = record("ansible.builtin.copy", {"changed": True, "dest": "/etc/a"})
    assert copied == [{"host": "w1", "kind": "files", "name": "/etc/a"}]
    started = record("ansible.builtin.systemd_service", {"changed": True, "name": "nginx.service"})
    assert started == [{"host": "w1", "kind": "units", "name": "nginx.service"}]


def test_what_did_not_change_is_not_recorded(record) -> None:
    assert record("ansible.builtin.copy", {"changed": False, "dest": "/etc/a"}) == []
    assert record("ansible.builtin.copy", {"changed": True, "dest": "/etc/a"}, check_mode=True) == []
    assert record("ansible.builtin.copy", {"changed": True, "dest": "/etc/a"}, delegate_to="localhost") == []
    assert record("ansible.builtin.apt", {"changed": True}) == []


def test_lock_of_another_package_manager_is_seen(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    hold = (
        f"import fcntl, sys; f = open({str(lock)!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); "
    )
    holder = constants(ON_NODE / "package_managers.py")["holder"]
    assert holder(str(lock)) is None
    with subprocess.Popen([sys.executable, "-c", hold + "sys.stdin.read()"], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        assert holder(str(lock)) == other.pid
        assert other.stdin
        other.stdin.close()
        other.wait()
    assert holder(str(lock)) is None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """adopted_host.py on a machine with carol's id 1500 and group 1502, where findmnt answers with a file system."""

    def made(fstype: str = "ext4", account: SimpleNamespace | None = None):
        script = constants(ON_NODE / "adopted_host.py")
        users = {1500: "carol", **({account.pw_uid: "horovod"} if account else {})}
        monkeypatch.setattr(script["pwd"], "getpwuid", users.__getitem__)
        monkeypatch.setattr(script["grp"], "getgrgid", {1502: "staff"}.__getitem__)
        monkeypatch.setattr(script["pwd"], "getpwnam", {"horovod": account}.__getitem__ if account else {}.__getitem__)
        script["run"] = lambda *argv, **_: fstype if argv[0] == "findmnt" else ""
        script["others"] = dict
        return script

    return made


def test_ids_of_others_are_taken_and_the_first_deploy_makes_a_local_home(machine) -> None:
    assert machine()["look"]("horovod") == {
        **{
            "uid": None,
            "home": "/home/horovod",
            "taken": [1500, 1502],
            "shared_home": False,
            "others": {},
            "refused_by": "",
        }
    }


@pytest.mark.parametrize("kind", ["nfs4", "autofs\nnfs", "fuse.glusterfs"])
def test_new_account_gets_no_home_on_a_network_file_system(machine, kind: str) -> None:
    found = machine(kind)["look"]("horovod")
    assert (found["home"], found["shared_home"]) == ("/var/lib/horovod-cluster-home", False)


def test_account_with_a_shared_home_is_reported(machine) -> None:
    account = SimpleNamespace(pw_uid=1507, pw_dir="/home/horovod")
    assert machine("nfs", account)["look"]("horovod") == {
        **{
            "uid": 1507,
            "home": "/home/horovod",
            "taken": [1500, 1502],
            "shared_home": True,
            "others": {},
            "refused_by": "",
        }
    }
    assert machine("ext4", account)["look"]("horovod")["shared_home"] is False


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ("port 22\nusepam yes", ""),
        ("allowusers alice\nallowusers bob", "AllowUsers"),
        ("allowusers alice\nallowusers horo*@10.0.0.0/8", ""),
        ("allowgroups admins", "AllowGroups"),
        ("allowgroups admins\nallowgroups horovod", ""),
        ("denyusers *", "DenyUsers"),
        ("denygroups guests", ""),
    ],
)
def test_ssh_server_that_keeps_the_account_out_is_found(settings: str, option: str) -> None:
    script = constants(ON_NODE / "adopted_host.py")
    script["run"] = lambda *argv: settings
    assert script["refused_by"]("horovod") == option


def test_what_others_use_is_named_with_the_field_that_would_change_it(tmp_path: Path) -> None:
    script = constants(ON_NODE / "adopted_host.py")
    script |= {"STATE": tmp_path / "state.json", "VOLUMES": tmp_path / "vols", "EXPORTS": tmp_path / "etab"}
    script["os"] = SimpleNamespace(path=SimpleNamespace(exists=lambda path: (tmp_path / "deployed").exists()))
    script["active_units"] = lambda: ["prometheus-node-exporter.service", "ssh.service"]
    (tmp_path / "vols/home").mkdir(parents=True)
    (tmp_path / "etab").write_text("/srv/home\t10.0.0.0/8(rw)\n")
    assert script["others"]() == {
        "features.monitoring": "prometheus-node-exporter.service",
        "storage.backend: glusterfs": "the GlusterFS volume home",
        "storage.backend: nfs": "the NFS export /srv/home",
    }
    script["active_units"] = lambda: ["ssh.service"]
    (tmp_path / "vols/home").rmdir()
    (tmp_path / "etab").write_text("")
    assert script["others"]() == {}
    # What runs where we have deployed may be ours.
    script["active_units"] = lambda: ["nginx.service"]
    assert script["others"]() == {"features.data": "nginx.service"}
    (tmp_path / "deployed").touch()
    assert script["others"]() == {}


@pytest.mark.parametrize(
    "line", ["192.0.2.9 head-backup", "192.0.2.9 my.head # head", "# 192.0.2.9 head", "", "192.0.2.9 heads"]
)
def test_line_that_only_contains_a_name_is_not_changed(line: str) -> None:
    hosts = {"__name__": "hosts"}
    exec(HOSTS.read_text(), hosts)  # noqa: S102
    written = hosts["written"]([f"{line}\n"], ["10.1.0.1 head\n"])
    assert written[-1] == f"{line}\n"


@pytest.mark.parametrize(
    "text", ["", "127.0.1.1 head.example head\n", "192.0.2.9 head", "127.0.0.1 a\n\n192.0.2.1 head b\n"]
)
def test_hosts_file_is_restored_to_the_byte(text: str) -> None:
    hosts = {"__name__": "hosts"}
    exec(HOSTS.read_text(), hosts)  # noqa: S102
    lines = text.splitlines(keepends=True)
    once = hosts["written"](lines, ["10.1.0.1 head\n", "10.1.0.2 w1\n"])
    assert hosts["written"](once, ["10.1.0.1 head\n", "10.1.0.2 w1\n"]) == once
    assert "".join(hosts["restored"]("".join(once).splitlines(keepends=True))) == text


def test_check_shows_a_file_of_an_account_that_the_first_deploy_will_make(tmp_path: Path) -> None:
    put = constants(ON_NODE / "write_files.py")["put"]
    entry = {"dest": f"{tmp_path}/key", "content": "k\n", "mode": "0600", "owner": "no-such-account", "group": "root"}
    assert put(entry, check=True) == (True, None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError):
        put({**entry, "validate": "", "on_change": []}, check=False)
