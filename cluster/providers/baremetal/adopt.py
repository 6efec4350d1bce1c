"""`cluster adopt`: print the host keys of existing machines and pin them after the user has compared them."""

from __future__ import annotations

import subprocess

from cluster.core import config, files, sections
from cluster.core.errors import InfraError, UserError
from cluster.core.state import State
from cluster.providers.baremetal.provider import Baremetal

TIMEOUT = 30


def scan(provider: Baremetal, host: sections.Host) -> str:
    """The host's 'type key', read through the jump host if there is one."""
    command = ["ssh-keyscan", "-T", "10", "-t", "ed25519", "-p", str(provider.cluster.ports.ssh), host.address]
    if provider.section.jump_host:
        command = ["ssh", "-o", "BatchMode=yes", provider.section.jump_host, *command]
    try:
        # Through a jump host, ssh would read the user's answer to the question below.
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise InfraError(f"host {host.name} ({host.address}): no answer within {TIMEOUT} s") from None
    lines = [line for line in done.stdout.splitlines() if " ssh-ed25519 " in line]
    if not lines:
        raise InfraError(f"host {host.name} ({host.address}): no ed25519 host key; check that SSH runs there")
    return " ".join(lines[0].split()[1:3])


def fingerprint(key: str) -> str:
    done = subprocess.run(["ssh-keygen", "-l", "-f", "-"], input=f"{key}\n", capture_output=True, text=True, check=True)
    return (done.stdout.split() or ["no", "unknown"])[1]


def run(env: str) -> int:
    cluster = config.load(env)
    if cluster.provider != "baremetal":
        raise UserError(f"ENV={env}: provider {cluster.provider} creates its own nodes; adopt is for baremetal hosts")
    state = State(env)
    provider = Baremetal(state, cluster)
    hosts, file = provider.section.hosts, provider.pinned_keys_file
    with state.locked():
        state.prepare()
        pinned = provider.pinned_keys()
        new: dict[str, str] = {}
        for host in hosts:
            key = scan(provider, host)
            if host.name not in pinned:
                new[host.name] = key
            elif pinned[host.name] != key:
                where = "host_key in cluster.yml" if host.host_key else str(file.relative_to(config.ROOT))
                raise UserError(f"host {host.name} ({host.address}): its key differs from the one in {where}")
            print(f"{host.name:12} {host.address:16} {fingerprint(key)}{' (new)' if host.name in new else ''}")
        if not new:
            print("all keys are already pinned")
        elif not confirmed():
            print("no key was pinned")
            return 1
        else:
            with file.open("a") as out:
                out.writelines(f"{provider.known_hosts_name(h)} {new[h.name]}\n" for h in hosts if h.name in new)
            print(f"pinned in {file.relative_to(config.ROOT)}")
    if not provider.section.key:
        key = files.text(state.key.with_suffix(".pub")).strip()
        print(f"user {provider.section.user} on the hosts must accept this public key:\n{key}")
    return 0


def confirmed() -> bool:
    print("Compare these with the output of `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on each machine.")
    try:
        return input("Are they the same? Type yes to pin them: ").strip() == "yes"
    except EOFError:
        print()
        return False
