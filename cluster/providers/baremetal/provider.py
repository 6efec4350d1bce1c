"""Hosts that exist already: looked at closely before anything is changed, and never created or destroyed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster.core import sections
from cluster.core.config import env_dir
from cluster.core.errors import InfraError, UserError
from cluster.providers.base import Check, Provider, Say

TIMEOUT = 60
# Run by the login shell of the host's user; prints one JSON object. Nothing but what every Debian has.
LOOK = r"""
. /etc/os-release
sudo -n true 2>/dev/null && root=true || root=false
command -v python3 >/dev/null && python=true || python=false
addresses=$(ip -o -4 address show 2>/dev/null | awk '{printf "%s\"%s %s\"", sep, $2, $4; sep=","}')
printf '{"name":"%s","os":"%s","release":"%s","sudo":%s,"python":%s,"addresses":[%s]}\n' \
  "$(hostname -s)" "$ID" "${VERSION_CODENAME:-}" "$root" "$python" "$addresses"
"""


class Baremetal(Provider):
    @property
    def section(self) -> sections.Baremetal:
        assert self.cluster.baremetal  # noqa: S101 (config.load saw to it)
        return self.cluster.baremetal

    @property
    def hosts(self) -> list[sections.Host]:
        return self.section.hosts[: self.cluster.nodes]

    @property
    def key(self) -> Path:
        return Path(self.section.key).expanduser() if self.section.key else self.state.key

    @property
    def pins(self) -> Path:
        """Host keys that `make adopt` showed and somebody accepted; kept with the environment.

        Ansible takes every file of that folder for an inventory, but not .txt.
        """
        return env_dir(self.state.env) / "known_hosts.txt"

    def known_as(self, host: sections.Host) -> str:
        port = self.cluster.ports.ssh
        return host.address if port == 22 else f"[{host.address}]:{port}"

    def pinned(self) -> dict[str, str]:
        """Host name -> 'type key', from cluster.yml or from `make adopt`."""
        lines = self.pins.read_text().splitlines() if self.pins.exists() else []
        adopted = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
        keys = {host.name: host.host_key or adopted.get(self.known_as(host)) for host in self.section.hosts}
        return {name: " ".join(key.split()[:2]) for name, key in keys.items() if key}

    def prepare(self, say: Say) -> None:
        missing = [host.name for host in self.hosts if host.name not in self.pinned()]
        if missing:
            fix = f"run `make adopt ENV={self.state.env}`"
            raise UserError(f"cluster.baremetal.hosts: no host key is known of {', '.join(missing)}; {fix}")
        self.write_known_hosts()
        for host, answer in zip(self.hosts, self.look(), strict=True):
            self._judge(host, answer)

    def write_known_hosts(self) -> None:
        pinned = self.pinned()
        lines = [f"{self.known_as(host)} {pinned[host.name]}\n" for host in self.hosts if host.name in pinned]
        self.state.known_hosts.write_text("".join(lines))

    def ssh(self, host: sections.Host, command: str) -> list[str]:
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": "10",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": str(self.state.known_hosts),
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
            **({"ProxyJump": self.section.jump_host} if self.section.jump_host else {}),
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        target = f"{self.section.user}@{host.address}"
        return ["ssh", "-i", str(self.key), "-p", str(self.cluster.ports.ssh), *words, target, command]

    def look(self) -> list[subprocess.CompletedProcess[str]]:
        """Log in to all hosts at once and see what they are."""
        command = f"sh -c {shlex.quote(LOOK)}"
        running = [
            subprocess.Popen(
                self.ssh(host, command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in self.hosts
        ]
        found = []
        for process in running:
            try:
                out, err = process.communicate(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = "", "timed out"
            found.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        return found

    def _judge(self, host: sections.Host, answer: subprocess.CompletedProcess[str]) -> None:
        """One line for the first thing that is not as cluster.yml says; nothing has been changed by then."""
        where = f"host {host.name} ({host.address})"
        if answer.returncode:
            last = (answer.stderr.strip().splitlines() or ["no answer"])[-1]
            if "Host key verification failed" in answer.stderr:
                fix = f"if it was installed anew, remove its line from {self.pins.name} and run `make adopt`"
                raise UserError(f"{where}: shows another host key than the pinned one; {fix}")
            if "Permission denied" in answer.stderr:
                fix = "put the public key into its authorized_keys, or correct baremetal.user or baremetal.key"
                raise UserError(f"{where}: user {self.section.user} may not log in with {self.key}; {fix}")
            raise InfraError(f"{where}: cannot be reached: {last}")
        try:
            seen: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        except (IndexError, json.JSONDecodeError):
            raise InfraError(f"{where}: strange answer: {answer.stdout.strip()[-200:]!r}") from None
        wanted = f"Debian {self.cluster.os_release}"
        if (seen["os"], seen["release"]) != ("debian", self.cluster.os_release):
            raise UserError(f"{where}: runs {seen['os']} {seen['release']}; the roles are made for {wanted}")
        if not seen["sudo"]:
            fix = f"allow it: '{self.section.user} ALL=(ALL) NOPASSWD: ALL' in /etc/sudoers.d"
            raise UserError(f"{where}: user {self.section.user} may not use sudo without a password; {fix}")
        if not seen["python"]:
            raise UserError(f"{where}: has no python3; apt-get install python3")
        if seen["name"] != host.name:
            raise UserError(f"{where}: calls itself {seen['name']}; write that name, or change its hostname")
        have = {tuple(text.split("/")[0].split()) for text in seen["addresses"]}
        for fabric, address in host.fabric_addresses.items():
            interface = self.section.networks[fabric].interface
            if (interface, address) not in have:
                raise UserError(f"{where}: has no address {address} on {interface}, as fabric {fabric} asks for")

    def variables(self) -> dict[str, str]:
        return {"tool": f"{sys.executable} -m cluster.providers.baremetal.reach"}

    def checks(self) -> list[Check]:
        pinned = self.pinned()
        missing = [host.name for host in self.hosts if host.name not in pinned]
        detail = f"missing: {', '.join(missing)}" if missing else f"{len(self.hosts)} pinned"
        return [Check("host keys", not missing, detail, f"make adopt ENV={self.state.env}")]
