"""`cluster release-hosts`: give existing machines back as they were before the first deploy."""

from __future__ import annotations

from subprocess import CompletedProcess
from typing import NotRequired

from typing_extensions import TypedDict

from cluster import in_use
from cluster.core import config, files, sections
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.lifecycle import deployed_contract
from cluster.providers.baremetal import guest
from cluster.providers.baremetal.provider import Baremetal


class Released(TypedDict):
    """What `adopted_host.py release` prints."""

    known: bool
    kept: NotRequired[list[str]]
    left: NotRequired[list[str]]
    packages: NotRequired[list[str]]


def run(env: str, yes: bool) -> int:
    cluster = config.load(env)
    if cluster.provider != "baremetal":
        raise UserError(f"ENV={env}: provider {cluster.provider} creates its own nodes; run `make destroy ENV={env}`")
    state, progress = State(env), Progress(env)
    provider = Baremetal(state, cluster)
    # After a destroy nothing here says which hosts were used.
    names = provider.hosts_in_use() or list(provider.pinned_keys())
    if not names:
        raise UserError(f"ENV={env}: no host was deployed from here; there is nothing to release")
    contract = deployed_contract(state)
    in_use.confirm(
        state, contract, contract.nodes if contract else [], f"release the hosts of ENV={env}", yes, share=False
    )
    hosts = [host for host in provider.section.hosts if host.name in names]
    with state.locked(ends_runs=True):
        state.prepare()
        provider.pin(names)
        with progress.phase("release"), progress.part("hosts", f"restoring {len(hosts)} hosts", "hosts restored"):
            guest.note(provider, progress)
            answers = guest.on_hosts(provider, {host.name: ["release"] for host in hosts})
        failed = [host.name for host in hosts if not show(host, answers[host.name])]
        # A login that the old settings of the SSH server and no firewall allow.
        fresh = provider.run({host.name: (host, "true") for host in hosts if host.name not in failed})
    locked = [name for name, done in fresh.items() if done.returncode]
    if failed or locked:
        raise InfraError(f"not released: {', '.join([*failed, *locked])}; the lines above say why; run this again")
    progress(f"the hosts are as they were; `make destroy ENV={env}` removes this machine's keys and state")
    return 0


def show(host: sections.Host, done: CompletedProcess[str]) -> bool:
    """Print what a host answered; return whether it is released."""
    if done.returncode:
        print(f"{host.name}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
        return False
    found = files.answer((done.stdout.splitlines() or [""])[-1], f"host {host.name}", Released)
    if not found["known"]:
        print(f"{host.name}: nothing to undo")
        return True
    print(f"{host.name}: restored")
    for title, names in (
        ("packages that stay", found.get("packages")),
        ("changed by others since, not touched", found.get("kept")),
        ("data that stays", found.get("left")),
    ):
        if names:
            print(f"  {title}: {' '.join(names)}")
    return True
