"""`cluster adopt`: show the host keys of existing machines, and pin those that somebody has looked at."""

from __future__ import annotations

import subprocess

from cluster.core import config, sections
from cluster.core.errors import InfraError, UserError
from cluster.core.state import State
from cluster.providers.baremetal.provider import Baremetal

TIMEOUT = 30


def scan(provider: Baremetal, host: sections.Host) -> str:
    """'type key' that the host shows, asked by way of the jump host where there is one."""
    command = ["ssh-keyscan", "-T", "10", "-t", "ed25519", "-p", str(provider.cluster.ports.ssh), host.address]
    if provider.section.jump_host:
        command = ["ssh", "-o", "BatchMode=yes", provider.section.jump_host, *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise InfraError(f"host {host.name} ({host.address}): no answer in {TIMEOUT} s") from None
    lines = [line for line in done.stdout.splitlines() if " ssh-ed25519 " in line]
    if not lines:
        raise InfraError(f"host {host.name} ({host.address}): shows no ed25519 host key; is it up, and is SSH running?")
    return " ".join(lines[0].split()[1:3])


def fingerprint(key: str) -> str:
    done = subprocess.run(["ssh-keygen", "-l", "-f", "-"], input=f"{key}\n", capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


def run(env: str) -> int:
    cluster = config.load(env)
    if cluster.provider != "baremetal":
        raise UserError(f"ENV={env}: provider {cluster.provider} makes its nodes itself; there is nothing to adopt")
    state = State(env)
    provider = Baremetal(state, cluster)
    with state.locked():
        state.prepare()
        pinned = provider.pinned()
        new: dict[str, str] = {}
        for host in provider.section.hosts:
            key = scan(provider, host)
            if host.name not in pinned:
                new[host.name] = key
            elif pinned[host.name] != key:
                where = "host_key in cluster.yml" if host.host_key else str(provider.pins.relative_to(config.ROOT))
                raise UserError(f"host {host.name} ({host.address}): shows another key than the one in {where}")
            print(f"{host.name:12} {host.address:16} {fingerprint(key)}{' (new)' if host.name in new else ''}")
        if not new:
            print("all of them are pinned already")
        elif not confirmed():
            print("nothing was pinned")
            return 1
        else:
            lines = [
                f"{provider.known_as(host)} {new[host.name]}\n" for host in provider.section.hosts if host.name in new
            ]
            with provider.pins.open("a") as file:
                file.writelines(lines)
            print(f"pinned in {provider.pins.relative_to(config.ROOT)}")
    if not provider.section.key:
        print(
            f"the hosts must let {provider.section.user} in with:\n{state.key.with_suffix('.pub').read_text().strip()}"
        )
    return 0


def confirmed() -> bool:
    print("Compare them with what the machines say themselves: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
    try:
        return input("Are they the same? Type yes to pin them: ").strip() == "yes"
    except EOFError:
        print()
        return False
