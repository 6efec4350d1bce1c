"""Existing hosts: checked in detail before anything is changed, and never created or destroyed."""

from __future__ import annotations

import ipaddress
import json
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from typing_extensions import TypedDict

from cluster.core import files, sections, ssh
from cluster.core.config import RELEASES, env_dir
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.providers.baremetal import link_rate, peers
from cluster.providers.base import Check, Provider

# The host's login shell runs this. It prints one JSON object and uses only tools that every Debian has.
INSPECT = r"""
. /etc/os-release
sudo -n true 2>/dev/null && root=true || root=false
command -v sudo >/dev/null && sudo=true || sudo=false
test -e /etc/horovod-cluster/firewall.nft && guarded=true || guarded=false
command -v python3 >/dev/null && python=true || python=false
addresses=$(ip -o -4 address show 2>/dev/null | awk '{printf "%s\"%s %s\"", sep, $2, $4; sep=","}')
sep=
speeds=$(for card in /sys/class/net/*; do
  speed=$(cat "$card/speed" 2>/dev/null) && [ "$speed" -gt 0 ] || continue
  printf '%s"%s":%s' "$sep" "${card##*/}" "$speed"
  sep=,
done)
printf '{"name":"%s","os":"%s","release":"%s","client":"%s",' \
  "$(hostname -s)" "$ID" "${VERSION_CODENAME:-}" "${SSH_CONNECTION%% *}"
printf '"root":%s,"sudo":%s,"python":%s,"guarded":%s,"addresses":[%s],"speeds":{%s}}\n' \
  "$root" "$sudo" "$python" "$guarded" "$addresses" "$speeds"
"""

# In the state folder, for terraform/baremetal: host -> fabric -> interface.
INTERFACES = "interfaces.json"


class Facts(TypedDict):
    """What INSPECT prints about a host."""

    name: str
    os: str
    release: str
    # whether sudo works without a password, and whether it is installed
    root: bool
    sudo: bool
    python: bool
    # whether our firewall is there
    guarded: bool
    # the address from which this machine, or the jump host, logs in; "" if the host does not tell it
    client: str
    addresses: list[str]
    # card -> Mbit/s, if its driver tells it
    speeds: dict[str, int]


def facts(answer: subprocess.CompletedProcess[str], where: str) -> Facts:
    return files.answer((answer.stdout.splitlines() or [""])[-1], where, Facts)


class Baremetal(Provider):
    section: sections.Baremetal
    removed = "this machine's keys and state are removed; the hosts stay as they are until `make release-hosts`"

    @property
    def hosts(self) -> list[sections.Host]:
        return self.section.hosts[: self.cluster.nodes]

    @property
    def key(self) -> Path:
        return Path(self.section.key).expanduser() if self.section.key else self.state.key

    @property
    def pinned_keys_file(self) -> Path:
        """Host keys that the user confirmed in `make adopt`; kept with the environment.

        Ansible reads every file in that folder as an inventory, except .txt files.
        """
        return env_dir(self.state.env) / "known_hosts.txt"

    def known_hosts_name(self, host: sections.Host) -> str:
        """The first field of the host's line in a known_hosts file."""
        port = self.cluster.ports.ssh
        return host.address if port == 22 else f"[{host.address}]:{port}"

    def pinned_keys(self) -> dict[str, str]:
        """Host name -> 'type key', from cluster.yml or from `make adopt`."""
        file = self.pinned_keys_file
        lines = files.text(file).splitlines() if file.exists() else []
        adopted = dict(line.split(" ", 1) for line in lines if " " in line and not line.startswith("#"))
        keys = {host.name: host.host_key or adopted.get(self.known_hosts_name(host)) for host in self.section.hosts}
        return {name: " ".join(key.split()[:2]) for name, key in keys.items() if key}

    def hosts_without_key(self) -> list[str]:
        pinned = self.pinned_keys()
        return [host.name for host in self.hosts if host.name not in pinned]

    def prepare(self, progress: Progress) -> None:
        if missing := self.hosts_without_key():
            fix = f"run `make adopt ENV={self.state.env}`"
            raise UserError(f"cluster.baremetal.hosts: no pinned host key for {', '.join(missing)}; {fix}")
        # Hosts that `nodes` leaves out now may have been used before, and are released with the others.
        self.pin({*self.hosts_in_use(), *(host.name for host in self.hosts)})
        answers = self.inspect_hosts()
        found = {host.name: self.check_host(host, answers[host.name]) for host in self.hosts}
        (self.state.dir / INTERFACES).write_text(json.dumps(found, indent=1))
        told = {name: facts(done, f"host {name}") for name, done in answers.items()}
        peers.check(self, {name for name, one in told.items() if one["guarded"]})
        speeds = {name: one["speeds"] for name, one in told.items()}
        link_rate.find(self, found, speeds, progress)

    def rates(self) -> dict[str, float]:
        return link_rate.known(self.state)

    def run(
        self, commands: Mapping[str, tuple[sections.Host, str]], input: str | None = None, timeout: float = 60
    ) -> dict[str, subprocess.CompletedProcess[str]]:
        """Run a command on each host, at the same time and over new connections."""
        options = ssh.connection_options(self.state.known_hosts, self.section.jump_host)
        words = ["ssh", "-i", str(self.key), "-p", str(self.cluster.ports.ssh), *ssh.ALIVE, *options]
        words += ["-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ControlPath=none"]
        argvs = {name: [*words, f"{self.section.user}@{host.address}", text] for name, (host, text) in commands.items()}
        return ssh.gather(argvs, input, timeout)

    def inspect_hosts(self) -> dict[str, subprocess.CompletedProcess[str]]:
        """Log in to all hosts at the same time and print their properties."""
        return self.run({host.name: (host, f"sh -c {shlex.quote(INSPECT)}") for host in self.hosts})

    @property
    def changes(self) -> Path:
        """What Ansible changed on hosts, until they have noted it themselves."""
        return self.state.dir / "changes.jsonl"

    def configured(self, progress: Progress) -> None:
        # It needs this class.
        from cluster.providers.baremetal import guest

        guest.note(self, progress)

    def pin(self, names: Collection[str]) -> None:
        """Accept these hosts with their pinned keys only."""
        keys = self.pinned_keys()
        used = [host for host in self.section.hosts if host.name in names and host.name in keys]
        lines = [f"{self.known_hosts_name(host)} {keys[host.name]}\n" for host in used]
        self.state.known_hosts.write_text("".join(lines))

    def hosts_in_use(self) -> list[str]:
        """The hosts of every deploy from here; none before the first one and after a destroy."""
        lines = files.text(self.state.known_hosts).splitlines() if self.state.known_hosts.exists() else []
        known = {line.split()[0] for line in lines if line}
        return [host.name for host in self.section.hosts if self.known_hosts_name(host) in known]

    def check_host(self, host: sections.Host, answer: subprocess.CompletedProcess[str]) -> dict[str, str]:
        """Raise an error for the first property that differs from cluster.yml. Nothing has been changed yet.

        Returns the interface of each fabric.
        """
        where = f"host {host.name} ({host.address})"
        user = self.section.user
        if answer.returncode:
            if "Host key verification failed" in answer.stderr:
                file = self.pinned_keys_file.name
                fix = f"if the host was reinstalled, remove its line from {file} and run `make adopt`"
                raise UserError(f"{where}: its host key is not the pinned one; {fix}")
            if "Permission denied" in answer.stderr:
                fix = "add the public key to its authorized_keys, or correct baremetal.user or baremetal.key"
                raise UserError(f"{where}: user {user} cannot log in with {self.key}; {fix}")
            raise InfraError(f"{where}: unreachable: {(answer.stderr.strip().splitlines() or ['no answer'])[-1]}")
        found = facts(answer, where)
        system, release = f"{found['os']} {found['release']}", self.cluster.os_release
        known = RELEASES[release]
        if system != f"{known.system} {release}":
            fix = "correct it" if found["release"] in RELEASES else f"install one of {', '.join(RELEASES)} on all hosts"
            raise UserError(f"{where}: runs {system}, but cluster.os_release is {release} ({known.title}); {fix}")
        if not found["sudo"]:
            raise UserError(f"{where}: sudo is missing; run `apt-get install sudo` there")
        if not found["root"]:
            fix = f"add '{user} ALL=(ALL) NOPASSWD: ALL' to /etc/sudoers.d"
            raise UserError(f"{where}: user {user} cannot use sudo without a password; {fix}")
        if not found["python"]:
            raise UserError(f"{where}: python3 is missing; run `apt-get install python3` there")
        if found["name"] != host.name:
            raise UserError(f"{where}: its hostname is {found['name']}; use it in cluster.yml, or change the hostname")
        present = [text.split("/")[0].split() for text in found["addresses"]]
        interfaces = {address: interface for interface, address in present}
        for fabric, address in host.fabric_addresses.items():
            wanted = self.section.networks[fabric].interface
            if address not in interfaces or wanted not in (None, interfaces[address]):
                fix = f"correct fabric_addresses.{fabric}" + (f" or networks.{fabric}.interface" if wanted else "")
                what = f"{wanted} does not have" if wanted else "no interface has"
                raise UserError(f"{where}: {what} the address {address}; {fix}")
        if found["client"] and not self.is_admitted(found["client"], list(interfaces)):
            networks = ", ".join(self.cluster.admin_cidrs)
            why = f"it sees this machine as {found['client']}, which is not in cluster.admin_cidrs ({networks})"
            raise UserError(f"{where}: {why}, so its firewall would lock you out; add the address")
        return {fabric: interfaces[address] for fabric, address in host.fabric_addresses.items()}

    def is_admitted(self, client: str, own: list[str]) -> bool:
        """Whether the firewall will accept logins from this address. own: addresses of the host itself."""
        address = ipaddress.ip_address(client.partition("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        peers = {one for host in self.hosts for one in host.fabric_addresses.values()}
        return str(address) in {*own, *peers} or any(
            address in ipaddress.ip_network(cidr) for cidr in self.cluster.admin_cidrs
        )

    def variables(self) -> dict[str, str]:
        return {"tool": f"{sys.executable} -m cluster.providers.baremetal.reach"}

    def checks(self) -> list[Check]:
        missing = self.hosts_without_key()
        detail = f"missing: {', '.join(missing)}" if missing else f"{len(self.hosts)} pinned"
        return [Check("host keys", not missing, detail, f"make adopt ENV={self.state.env}")]
