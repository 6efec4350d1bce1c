"""What a deploy finds of an earlier one.

Nodes that run are kept. If Terraform's state is gone, they are adopted where the provider can do that. Otherwise the
command stops and says what would be lost; also if our key is gone, or if cluster.yml now describes other nodes.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import dataclass, field

from cluster.core import files, tfstate
from cluster.core.config import Cluster
from cluster.core.errors import InfraError, UserError
from cluster.core.progress import Progress
from cluster.core.state import State
from cluster.providers import registry
from cluster.providers.base import Provider, Survivor, index
from cluster.terraform import read_output


@dataclass(frozen=True)
class Found:
    """cluster: with the number of nodes that a deploy without NODES= keeps."""

    state: State
    cluster: Cluster
    provider: Provider
    # Nodes that run and that Terraform does not know; they are kept.
    adopted: list[str] = field(default_factory=list)
    # What --replace gives up.
    replaced: list[str] = field(default_factory=list)
    damaged: str = ""
    new_key: bool = False

    def carry_out(self, progress: Progress) -> None:
        """Before Terraform runs: keep a damaged state under another name, and remove what is given up."""
        if self.adopted:
            progress(f"Terraform's state has lost {', '.join(self.adopted)}: adopting them as they are")
        if self.damaged:
            kept = self.state.tfstate.with_suffix(".damaged")
            self.state.tfstate.replace(kept)
            progress(f"{self.damaged}; the file is now {kept.name}")
        if self.replaced:
            progress(f"replacing {', '.join(self.replaced)}; their data is lost")
            self.provider.discard([name for name in self.replaced if name not in self.known()])
        if self.new_key:
            self.state.key.unlink(missing_ok=True)

    def known(self) -> set[str]:
        return set() if self.damaged else tfstate.nodes(self.state.tfstate)

    def addresses(self) -> list[str]:
        """Terraform addresses of nodes that it knows and that must be made again, because they accept another key."""
        return [self.provider.address(name) for name in self.replaced if name in self.known()] if self.new_key else []


def key_problem(state: State) -> str:
    """Why nobody can log in with our key; "" if it works."""
    public = state.key.with_suffix(".pub")
    if not state.key.exists():
        return f"{state.key.name} is missing"
    argv = ["ssh-keygen", "-y", "-P", "", "-f", str(state.key)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        return f"{state.key.name} cannot be read ({(done.stderr.strip().splitlines() or ['no reason given'])[-1]})"
    if public.exists() and files.text(public).split()[:2] != done.stdout.split()[:2]:
        return f"{state.key.name} does not belong to {public.name}"
    return ""


def examine(state: State, cluster: Cluster, requested: int | None, replace: bool) -> Found:
    """Look at what exists; UserError if a deploy would lose nodes and replace is not set. Change nothing."""
    damaged = tfstate.damage(state.tfstate)
    known = set() if damaged else tfstate.nodes(state.tfstate)
    survivors = registry.provider(state, cluster).survivors(known)
    if survivors and not damaged and state.tfstate.exists() and not tfstate.read(state.tfstate).get("resources"):
        damaged = f"{state.tfstate.name} is empty"
    unknown = [one.name for one in survivors if one.name not in known]
    cluster = cluster.model_copy(update={"nodes": count(state, cluster, requested, damaged, unknown)})
    provider = registry.provider(state, cluster)
    causes = lost_nodes(cluster, survivors, known, damaged or f"{state.tfstate.name} does not have them")
    key = key_problem(state) if provider.own_key and (known or survivors) else ""
    if key:
        causes |= dict.fromkeys(known | set(unknown), f"{key}, and the nodes accept no other key")
    lost = sorted(causes, key=index)
    if lost and not replace:
        reasons = "; ".join(dict.fromkeys(causes[name] for name in lost))
        fix = f"restore the files of {state.dir} or the fields of cluster.yml"
        text = (
            f"ENV={state.env}: {', '.join(lost)} and all data on them would be lost: {reasons}; {fix}, or replace them"
        )
        raise UserError(f"{text} with `make deploy ENV={state.env} REPLACE=1`")
    adopted = [name for name in unknown if name not in lost]
    return Found(state, cluster, provider, sorted(adopted, key=index), lost, damaged, bool(key))


def count(state: State, cluster: Cluster, requested: int | None, damaged: str, unknown: list[str]) -> int:
    """A count set with NODES= or by scale stays until another is given."""
    if requested is not None or not registry.PROVIDERS[cluster.provider].has_nodes:
        return cluster.nodes
    if not damaged and tfstate.output(tfstate.read(state.tfstate)):
        with suppress(InfraError):
            return len(read_output(state).nodes)
    return max(map(index, unknown)) + 1 if unknown else cluster.nodes


def lost_nodes(cluster: Cluster, survivors: list[Survivor], known: set[str], gone: str) -> dict[str, str]:
    """Nodes that a deploy would remove or replace -> why."""
    causes = {}
    for one in survivors:
        if one.name in known:
            if one.outdated:
                causes[one.name] = one.obstacle
        elif one.obstacle:
            causes[one.name] = f"{gone}, and {one.obstacle}"
        elif index(one.name) >= cluster.nodes:
            causes[one.name] = f"{gone}, and cluster.nodes is {cluster.nodes}"
    return causes
