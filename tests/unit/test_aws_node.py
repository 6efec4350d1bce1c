"""The scripts that cloud-init installs on EC2 nodes, run here with stand-ins for the commands that change a machine."""

from __future__ import annotations

import os
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cluster.core.config import ROOT
from cluster.providers.aws.expiry import FORMAT

NODE = ROOT / "terraform/aws/node"


class Machine:
    """A folder of commands that only record how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.calls.touch()
        (folder / "bin").mkdir()
        self.env = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def command(self, name: str, then: str = "exit 0") -> None:
        path = self.folder / "bin" / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.calls}\n{then}\n')
        path.chmod(0o755)

    def run(self, tool: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        return subprocess.run(["sh", NODE / tool, *words], env=self.env, capture_output=True, text=True)

    @property
    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def in_hours(hours: float) -> str:
    return (datetime.now(UTC) + timedelta(hours=hours)).strftime(FORMAT)


def test_node_powers_off_when_its_time_is_over_and_not_before(machine):
    machine.command("systemctl")
    machine.command("wall")
    assert machine.run("cluster-expiry", "set", in_hours(1), "0", machine.folder).returncode == 0
    assert machine.run("cluster-expiry", "check", machine.folder).returncode == 0
    assert machine.called == []
    assert machine.run("cluster-expiry", "set", in_hours(-0.1), "0", machine.folder).returncode == 0
    machine.run("cluster-expiry", "check", machine.folder)
    assert machine.called == ["systemctl poweroff"]


def test_idle_node_powers_off_and_a_used_one_does_not(machine):
    """The paths of a node are replaced in a copy of the script."""
    marks = {name: machine.folder / name for name in ("cluster-expiry.active", ".cluster-active", "hosts", "loadavg")}
    marks["hosts"].write_text("10.0.0.1 head\n10.0.0.2 w1\n10.0.0.3 w12\n")
    marks["loadavg"].write_text("0.10 0.10 0.10 1/100 1000\n")
    text = (NODE / "cluster-expiry").read_text().replace("/etc/hosts.cluster", str(marks["hosts"]))
    text = text.replace("/run/", f"{machine.folder}/").replace("/home/horovod/", f"{machine.folder}/")
    script = machine.folder / "cluster-expiry"
    script.write_text(text.replace("/proc/loadavg", str(marks["loadavg"])))
    for name in ("systemctl", "wall", "runuser"):
        machine.command(name)
    machine.command("ss", f"cat {machine.folder}/connections 2> /dev/null")
    machine.run(script, "set", in_hours(1), "30", machine.folder)

    def check(minutes_idle: float, head_active: float = 1e6) -> list[str]:
        now = time.time()
        for mark, minutes in (("cluster-expiry.active", minutes_idle), (".cluster-active", head_active)):
            marks[mark].touch()
            os.utime(marks[mark], (now - 60 * minutes,) * 2)
        assert machine.run(script, "check", machine.folder).returncode == 0
        return [line for line in machine.called if not line.startswith("ss ")]

    kept = [
        f"runuser -u horovod -- ssh -o BatchMode=yes -o ConnectTimeout=5 {name} touch .cluster-active"
        for name in ("w1", "w12")
    ]
    assert check(29) == []
    assert check(31) == ["systemctl poweroff"]
    assert check(31, head_active=5) == []
    (machine.folder / "connections").write_text("0 0 10.0.0.1:22 198.51.100.7:50000\n")
    assert check(31) == kept
    (machine.folder / "connections").unlink()
    assert check(31) == ["systemctl poweroff"]
    marks["loadavg"].write_text("0.90 0.10 0.10 1/100 1000\n")
    assert check(31) == kept
    machine.run(script, "set", in_hours(1), "0", machine.folder)
    marks["loadavg"].write_text("0.10 0.10 0.10 1/100 1000\n")
    assert check(31) == []


def test_node_without_a_valid_date_stays(machine):
    machine.command("systemctl")
    date = machine.folder / "expires"
    assert machine.run("cluster-expiry", "check", machine.folder).returncode == 1
    date.write_text("unset\n")
    assert machine.run("cluster-expiry", "check", machine.folder).returncode == 1
    assert machine.called == []
    assert machine.run("cluster-expiry", "set", "tomorrowish", "0", machine.folder).returncode != 0
    assert date.read_text() == "unset\n"


class Disks:
    """Instance-store disks under the names that udev gives them, and the commands that make a filesystem of them."""

    def __init__(self, machine: Machine, count: int) -> None:
        self.machine, self.by_id = machine, machine.folder / "by-id"
        self.by_id.mkdir()
        self.array = machine.folder / "array"
        self.disks = [machine.folder / f"nvme{number}n1" for number in range(1, count + 1)]
        for number, disk in enumerate(self.disks):
            disk.touch()
            for suffix in ("", "_1"):
                (self.by_id / f"nvme-Amazon_EC2_NVMe_Instance_Storage_AWS{number}{suffix}").symlink_to(disk)
        system = machine.folder / "nvme0n1"
        system.touch()
        (self.by_id / "nvme-Amazon_Elastic_Block_Store_vol1").symlink_to(system)
        machine.command("mountpoint", "exit 1")
        machine.command("blkid", "exit 2")
        for name in ("mkfs.ext4", "mount", "apt-get"):
            machine.command(name)
        machine.command("mdadm", f'[ "$1" = --assemble ] || touch {self.array}')
        machine.command("lsblk", f"[ ! -e {self.array} ] || echo /dev/md127 raid0")

    def mount(self) -> list[str]:
        done = self.machine.run("node-scratch", self.by_id, self.machine.folder / "scratch")
        assert done.returncode == 0, done.stderr
        return [line for line in self.machine.called if line.startswith(("mdadm --create", "mkfs", "mount "))]


def test_all_instance_store_disks_become_one_stripe(machine):
    disks = Disks(machine, 3)
    names = " ".join(map(str, disks.disks))
    assert disks.mount() == [
        f"mdadm --create /dev/md/scratch --run --homehost=any --level=0 --raid-devices=3 {names}",
        "mkfs.ext4 -q -E nodiscard /dev/md127",
        f"mount /dev/md127 {machine.folder}/scratch",
    ]


def test_after_a_reboot_the_stripe_and_its_data_are_kept(machine):
    disks = Disks(machine, 2)
    disks.array.touch()
    machine.command("blkid")
    assert disks.mount() == [f"mount /dev/md127 {machine.folder}/scratch"]


def test_one_disk_needs_no_stripe_and_none_no_mount(machine):
    disks = Disks(machine, 1)
    assert disks.mount() == [
        f"mkfs.ext4 -q -E nodiscard {disks.disks[0]}",
        f"mount {disks.disks[0]} {machine.folder}/scratch",
    ]
    for link in disks.by_id.glob("*Instance_Storage*"):
        link.unlink()
    assert disks.mount() == []
