"""What a deploy changes on an existing machine is noted there, so that `make release-hosts` can undo it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from subprocess import CompletedProcess

from cluster.core import files
from cluster.core.config import ROOT, layout
from cluster.core.progress import Progress
from cluster.providers.baremetal.provider import Baremetal

SCRIPT = ROOT / "ansible/plugins/on_node/adopted_host.py"
SECONDS = 600


def on_hosts(provider: Baremetal, words: Mapping[str, list[str]]) -> dict[str, CompletedProcess[str]]:
    """Run adopted_host.py as root on hosts, each with its own words."""
    hosts = {host.name: host for host in provider.section.hosts}
    commands = {
        name: (hosts[name], f"sudo -n python3 -I - {shlex.join([more[0], layout()['user'], *more[1:]])}")
        for name, more in words.items()
    }
    return provider.run(commands, SCRIPT.read_text(), SECONDS)


def note(provider: Baremetal, progress: Progress) -> None:
    """After Ansible, also when it failed: every host notes what was changed on it. What fails is noted next time."""
    file = provider.changes
    entries = [json.loads(line) for line in files.text(file).splitlines()] if file.exists() else []
    words: dict[str, list[str]] = {}
    for host in provider.hosts:
        kinds: dict[str, list[str]] = {"files": [], "units": []}
        for entry in entries:
            if entry["host"] == host.name:
                kinds[entry["kind"]].append(entry["name"])
        words[host.name] = ["note", json.dumps({kind: sorted(set(names)) for kind, names in kinds.items()})]
    failed = {name for name, done in on_hosts(provider, words).items() if done.returncode}
    file.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries if entry["host"] in failed))
    if failed:
        progress(f"could not note on {', '.join(sorted(failed))} what was changed there; the next deploy does it")
