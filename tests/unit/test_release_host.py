"""adopted_host.py gives a machine back: on copies of this machine's /etc and other folders, in namespaces of their own.

Mounts, processes and network are separate, systemctl only records how it was called. Needs root and Debian's tools.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cluster.core.config import ROOT

ON_NODE = ROOT / "ansible/plugins/on_node"
ISOLATED = ["unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "--propagation", "private"]
TOOLS = ("unshare", "useradd", "dpkg-query", "findmnt")
CAN_ISOLATE = (
    os.geteuid() == 0
    and all(map(shutil.which, TOOLS))
    and subprocess.run([*ISOLATED, "true"], capture_output=True).returncode == 0
)
pytestmark = pytest.mark.skipif(not CAN_ISOLATE, reason=f"needs root, namespaces and {', '.join(TOOLS)}")
# glusterd was there before: it has a service of somebody else.
SYSTEMCTL = """#!/bin/sh
echo "$*" >> /var/lib/calls
case "$*" in
  *list-unit-files*)
    echo "glusterd.service enabled enabled"
    sed 's/$/.service enabled enabled/' /var/lib/packages
    [ ! -e /etc/systemd/system/cluster-firewall.service ] || echo "cluster-firewall.service enabled enabled" ;;
  *list-units*) echo "glusterd.service loaded active running" ;;
esac
"""
# Names in a file instead of packages; each has a service.
DPKG_QUERY = """#!/bin/sh
if [ "$1" = --listfiles ]; then shift; printf '/lib/systemd/system/%s.service\\n' "$@"
else sed 's/^/ii\\t/' /var/lib/packages; fi
"""
PREPARE = """
set -eu
for folder in /etc /usr/local/bin /usr/local/sbin; do mkdir -p "$1$folder"; cp -a $folder/. "$1$folder/"; done
mkdir -p "$1/home" "$1/var/lib" "$1/var/cache" "$1/opt" "$1/srv" "$1/var/mail"
for folder in /etc /usr/local/bin /usr/local/sbin /home /var/lib /var/cache /var/mail /opt /srv; do
  mount --rbind "$1$folder" $folder
done
cp "$1/systemctl" "$1/dpkg-query" /usr/local/bin
echo first > /var/lib/packages
userdel horovod 2> /dev/null || true
echo original > /etc/site.conf
tell() { find /etc \\( -type f -exec sha256sum {} + \\) -o \\( -type l -printf '%l  %p\\n' \\) | sort; }
host() { python3 -I "$1/adopted_host.py" "$2" horovod "${3:-}"; }
tell > "$1/before"
"""
# What a deploy does, in short.
DEPLOY = """
host "$1" begin /home/shared
useradd --uid 1577 --create-home horovod
mkdir -p /etc/horovod-cluster /home/shared /etc/systemd/system/glusterd.service.d /var/cache/horovod-cluster /srv/share
echo a > /etc/horovod-cluster/fabrics.json
echo b > /etc/systemd/system/cluster-firewall.service
echo c > /etc/systemd/system/glusterd.service.d/shared-storage.conf
echo changed > /etc/site.conf
echo e > /etc/later.conf
echo ours >> /var/lib/packages
host "$1" note '{"files": ["/etc/systemd/system/cluster-firewall.service", "/etc/systemd/system/glusterd.service.d",
  "/etc/systemd/system/glusterd.service.d/shared-storage.conf", "/etc/site.conf", "/etc/later.conf"],
  "units": ["cluster-firewall.service"]}'
"""
RELEASE = """
: > /var/lib/calls
host "$1" release > "$1/said"
tell > "$1/after"
ls -d /home/* /var/lib/horovod-cluster /var/cache/* /srv/* > "$1/folders" 2> /dev/null || true
cp /var/lib/calls "$1/calls"
"""


@pytest.fixture
def machine(tmp_path: Path):
    shutil.copy(ON_NODE / "adopted_host.py", tmp_path)
    for name, text in (("systemctl", SYSTEMCTL), ("dpkg-query", DPKG_QUERY)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*steps: str) -> dict[str, str]:
        script = "\n".join((PREPARE, *steps))
        done = subprocess.run([*ISOLATED, "sh", "-c", script, "sh", tmp_path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        names = ("before", "after", "said", "folders", "calls")
        return {name: (tmp_path / name).read_text() for name in names}

    return run


def test_released_machine_is_as_it_was_before_the_first_deploy(machine):
    found = machine(DEPLOY, RELEASE)
    assert found["after"] == found["before"]
    # The data of the share stays and is named.
    assert found["folders"] == "/srv/share\n"
    assert found["said"] == '{"known": true, "kept": [], "left": ["/srv/share"], "packages": ["ours"]}\n'


def test_only_our_unit_ends_and_a_service_of_others_runs_again_without_our_settings(machine):
    calls = machine(DEPLOY, RELEASE)["calls"].splitlines()
    assert "disable --now cluster-firewall.service" in calls
    assert calls.index("daemon-reload") < calls.index("restart glusterd.service")
    assert not [call for call in calls if "ssh" in call]


def test_package_that_somebody_installed_between_deploys_stays_as_it_is(machine):
    later = 'echo theirs >> /var/lib/packages; host "$1" begin /home/shared; echo more >> /var/lib/packages'
    found = machine(DEPLOY, later, RELEASE)
    assert '"packages": ["more", "ours"]' in found["said"]
    calls = found["calls"].splitlines()
    assert {"disable ours.service", "stop ours.service", "stop more.service"} <= set(calls)
    assert not [call for call in calls if "theirs" in call or "first" in call]


def test_file_that_somebody_changed_since_is_kept_and_named(machine):
    found = machine(DEPLOY, "echo mine > /etc/later.conf", RELEASE)
    assert '"kept": ["/etc/later.conf"]' in found["said"]
    assert [line.split()[1] for line in found["after"].splitlines() if line not in found["before"].splitlines()] == [
        "/etc/later.conf"
    ]


def test_release_that_was_interrupted_can_be_repeated(machine):
    keep = "cp -a /var/lib/horovod-cluster /var/lib/copy"
    again = "cp -a /var/lib/copy /var/lib/horovod-cluster"
    found = machine(DEPLOY, keep, RELEASE, again, RELEASE)
    assert found["after"] == found["before"]
    assert '"kept": []' in found["said"]


def test_machine_without_a_record_is_left_alone(machine):
    found = machine(RELEASE)
    assert found["said"] == '{"known": false}\n'
    assert found["calls"] == ""


def test_deploy_that_ended_before_it_noted_anything_can_be_released(machine):
    found = machine('host "$1" begin /home/shared; mkdir /home/shared', RELEASE)
    assert found["after"] == found["before"]
    assert found["folders"] == ""
